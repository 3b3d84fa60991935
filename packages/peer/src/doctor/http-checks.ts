import { METRICS } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import { type Check, type CheckParts, check, type Role } from "../checks/report.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import { readRemotePrefill } from "../protocol/remote-engine.js";
import type { HttpFacts } from "./server-facts.js";

const QUEUE_TIME = "vllm:request_queue_time_seconds";

/** `ask`: request a prefill, whose answer has the side channel's address. */
export async function readHttp(
  role: Role,
  server: EngineServer,
  ask: boolean,
): Promise<HttpFacts & { reading: Check[] }> {
  const reading: Check[] = [];
  const note = (name: string, ...parts: CheckParts): undefined => {
    reading.push(check(`${role}.${name}`, ...parts));
  };
  try {
    await server.health();
  } catch (thrown) {
    const { message, hint } = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", server.url);
    const fix = hint ?? "start the server, or wait until it is healthy";
    note("http", "HTTP", "fail", message, fix);
    return { reading };
  }
  note("http", "HTTP", "ok", `${server.url} is healthy`);

  const vllmVersion = await server.version().catch(() => undefined);
  const isAbsent = vllmVersion === undefined;
  note("version", "version", isAbsent ? "note" : "ok", vllmVersion ?? "the server has no /version");

  const model = await server
    .model()
    .catch(({ message }: Error) =>
      note("model", "model", "fail", message, "check the server's /v1/models"),
    );
  if (model !== undefined) {
    const { id, root = id } = model;
    const started = root === id ? "" : `, started as "${root}"`;
    note("model", "model", "ok", `"${id}"${started}`, undefined, { ...model });
  }

  const samples = await server.metrics().catch(() => undefined);
  const failures = samples?.sum(`${METRICS.failedTransfers}_total`) ?? 0;
  const expired = samples?.sum(`${METRICS.expiredRequests}_total`) ?? 0;
  if (samples === undefined) note("metrics", "metrics", "note", "the server has no /metrics");
  else if (failures + expired === 0)
    note("metrics", "metrics", "ok", "no failed transfers, no expired requests");
  else {
    const found = `since the server started, ${failures} transfers failed and ${expired} requests expired before they were read`;
    const fix =
      "see the server's log: failed transfers and handshakes have a failure_type, expired requests their id";
    note("metrics", "metrics", "warn", found, fix, { failures, expired });
  }
  const p99Seconds = samples?.quantile(QUEUE_TIME, 0.99);
  const requests = samples?.sum(`${QUEUE_TIME}_count`) ?? 0;

  async function askForBlocks(): Promise<RemotePrefillParams | undefined> {
    const title = "kv_transfer_params";
    try {
      const params = readRemotePrefill(await server.prefill(PROBE_PROMPT));
      const { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode } =
        params;
      const stages = ppSize > 1 ? `, PP ${ppSize}` : "";
      const found = `engine ${remoteEngineId} at ${remoteHost}:${remotePort}, TP ${tpSize}${stages}, ${transferMode}`;
      const address = { remoteEngineId, remoteHost, remotePort };
      const details = { ...address, tpSize, ppSize, dcpSize, transferMode };
      note("transfer-params", title, "ok", found, undefined, details);
      return params;
    } catch (thrown) {
      const { message, hint } = KvError.from(thrown, "KV_REQUEST_INVALID", title);
      // A server that only decodes need not answer prefill requests.
      return role === "prefill"
        ? note("transfer-params", title, "fail", message, hint)
        : note("transfer-params", title, "note", message);
    }
  }

  return {
    vllmVersion,
    model,
    cacheSettings: samples?.labels("vllm:cache_config_info"),
    queueTime: p99Seconds === undefined ? undefined : { requests, p99Seconds },
    remotePrefill: ask && model !== undefined ? await askForBlocks() : undefined,
    reading,
  };
}
