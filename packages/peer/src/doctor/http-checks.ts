import { METRICS } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import type { HttpFacts } from "./server-facts.js";

const DATE_HEADER_RESOLUTION_MS = 1000;
const QUEUE_TIME = "vllm:request_queue_time_seconds";

/**
 * Reads what a server announces over HTTP. `ask`: send a prefill request of two tokens, whose
 * answer has the side channel's address.
 */
export async function readHttp(
  role: Role,
  server: EngineServer,
  ask: boolean,
): Promise<HttpFacts & { reading: Check[] }> {
  try {
    await server.health();
  } catch (thrown) {
    const { message, hint } = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", server.url);
    const fix = hint ?? "start the server, or wait until it is healthy";
    return { reading: [check(`${role}.http`, "HTTP", "fail", message, { fix })] };
  }
  const reading = [check(`${role}.http`, "HTTP", "ok", `${server.url} is healthy`)];

  const vllmVersion = await server.version().catch(() => undefined);
  reading.push(
    vllmVersion === undefined
      ? check(`${role}.version`, "version", "note", "the server has no /version")
      : check(`${role}.version`, "version", "ok", vllmVersion),
  );
  const model = await readModel(role, server, reading);
  const metrics = await readMetrics(role, server, reading);
  const wallClockMs = await readWallClock(server);
  const remotePrefill =
    ask && model !== undefined ? await askForBlocks(role, server, reading) : undefined;
  return { vllmVersion, model, ...metrics, wallClockMs, remotePrefill, reading };
}

async function readModel(
  role: Role,
  server: EngineServer,
  reading: Check[],
): Promise<HttpFacts["model"]> {
  const id = `${role}.model` as const;
  try {
    const model = await server.model();
    const isNamed = model.root !== undefined && model.root !== model.id;
    const found = `"${model.id}"${isNamed ? `, started as "${model.root}"` : ""}`;
    reading.push(check(id, "model", "ok", found, { details: { ...model } }));
    return model;
  } catch (error) {
    const fix = "check the server's /v1/models";
    reading.push(check(id, "model", "fail", (error as Error).message, { fix }));
    return undefined;
  }
}

async function readMetrics(
  role: Role,
  server: EngineServer,
  reading: Check[],
): Promise<Pick<HttpFacts, "cacheSettings" | "queueTime">> {
  const id = `${role}.metrics` as const;
  const samples = await server.metrics().catch(() => undefined);
  if (samples === undefined) {
    reading.push(check(id, "metrics", "note", "the server has no /metrics"));
    return {};
  }
  const failures = samples.sum(`${METRICS.failedTransfers}_total`) ?? 0;
  const expired = samples.sum(`${METRICS.expiredRequests}_total`) ?? 0;
  reading.push(
    failures + expired === 0
      ? check(id, "metrics", "ok", "no failed transfers, no expired requests")
      : check(
          id,
          "metrics",
          "warn",
          `since the server started, ${failures} transfers failed and ${expired} requests expired before they were read`,
          {
            fix: "see the server's log: failed transfers and handshakes have a failure_type, expired requests their id",
            details: { failures, expired },
          },
        ),
  );
  const p99Seconds = samples.quantile(QUEUE_TIME, 0.99);
  const requests = samples.sum(`${QUEUE_TIME}_count`) ?? 0;
  return {
    cacheSettings: samples.labels("vllm:cache_config_info"),
    queueTime: p99Seconds === undefined ? undefined : { requests, p99Seconds },
  };
}

async function readWallClock(server: EngineServer): Promise<HttpFacts["wallClockMs"]> {
  const date = await server.date().catch(() => undefined);
  return (
    date && {
      least: date.theirsMs - date.toMs,
      most: date.theirsMs + DATE_HEADER_RESOLUTION_MS - date.fromMs,
    }
  );
}

async function askForBlocks(
  role: Role,
  server: EngineServer,
  reading: Check[],
): Promise<RemotePrefillParams | undefined> {
  const id = `${role}.transfer-params` as const;
  const title = "kv_transfer_params";
  try {
    const params = readRemotePrefill(await server.prefill(PROBE_PROMPT));
    const { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode } =
      params;
    const stages = ppSize > 1 ? `, PP ${ppSize}` : "";
    const found = `engine ${remoteEngineId} at ${remoteHost}:${remotePort}, TP ${tpSize}${stages}, ${transferMode}`;
    const details = {
      remoteEngineId,
      remoteHost,
      remotePort,
      tpSize,
      ppSize,
      dcpSize,
      transferMode,
    };
    reading.push(check(id, title, "ok", found, { details }));
    return params;
  } catch (thrown) {
    const { message, hint } = KvError.from(thrown, "KV_REQUEST_INVALID", title);
    // A server that only decodes need not answer prefill requests.
    reading.push(
      role === "prefill"
        ? check(id, title, "fail", message, { fix: hint })
        : check(id, title, "note", message),
    );
    return undefined;
  }
}
