import type { ServerUnaryCall, ServerWritableStream, sendUnaryData } from "@grpc/grpc-js";
import { status as GrpcStatus, type UntypedServiceImplementation } from "@grpc/grpc-js";
import { repeat } from "@kv/fleet/front-end";
import type { Clock } from "@kv/interface";
import { EXT_PROC } from "./grpc-server.js";

interface HealthRequest {
  readonly service?: string;
}

interface HealthResponse {
  readonly status: "SERVING" | "NOT_SERVING" | "SERVICE_UNKNOWN";
}

const LOOK_MS = 1_000;

/**
 * `liveness` is always serving. `readiness`, the ext_proc service and the empty name follow
 * `isReady`.
 */
export function healthService(
  isReady: () => Promise<boolean>,
  clock: Clock,
): UntypedServiceImplementation {
  async function statusOf(service = ""): Promise<HealthResponse["status"]> {
    if (service === "liveness") return "SERVING";
    if (service !== "" && service !== "readiness" && service !== EXT_PROC) return "SERVICE_UNKNOWN";
    return (await isReady()) ? "SERVING" : "NOT_SERVING";
  }
  return {
    Check(
      { request }: ServerUnaryCall<HealthRequest, HealthResponse>,
      answer: sendUnaryData<HealthResponse>,
    ) {
      void statusOf(request.service).then((status) => {
        if (status !== "SERVICE_UNKNOWN") answer(null, { status });
        else
          answer({ code: GrpcStatus.NOT_FOUND, details: `there is no service ${request.service}` });
      });
    },
    Watch(call: ServerWritableStream<HealthRequest, HealthResponse>) {
      let last: HealthResponse["status"] | undefined;
      const looking = repeat(clock, async (isClosed) => {
        const status = await statusOf(call.request.service);
        if (!isClosed() && status !== last) call.write({ status });
        last = status;
        return LOOK_MS;
      });
      call.once("cancelled", () => looking.close());
    },
  };
}
