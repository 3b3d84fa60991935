import { KvError } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import type { EngineServer } from "../http/engine-server.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import { type Check, type Role, ServerChecks } from "./pair-report.js";
import type { HttpFacts } from "./server-facts.js";

export const NO_HTTP_FACTS: HttpFacts = {
  vllmVersion: undefined,
  model: undefined,
  cacheSettings: undefined,
  queueTime: undefined,
  wallClockMs: undefined,
  remotePrefill: undefined,
};

/**
 * The shortest possible prompt. The server keeps its block until it is notified or the lease ends.
 */
const PROBE_PROMPT = [20, 30];
const DATE_HEADER_RESOLUTION_MS = 1000;

/**
 * Reads what a server announces over HTTP. `ask`: send a prefill request of two tokens, whose
 * answer has the side channel's address.
 */
export async function checkHttp(
  role: Role,
  server: EngineServer,
  ask: boolean,
): Promise<{ facts: HttpFacts; checks: Check[] }> {
  const checks = new ServerChecks(role);
  try {
    await server.health();
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", server.url);
    const fix = error.hint ?? "start the server, or wait until it is healthy";
    checks.add("http", { title: "HTTP", status: "fail", found: error.message, fix });
    return { facts: NO_HTTP_FACTS, checks: checks.all };
  }
  checks.add("http", { title: "HTTP", status: "ok", found: `${server.url} is healthy` });

  const vllmVersion = await server.version().catch(() => undefined);
  if (vllmVersion === undefined)
    checks.add("version", {
      title: "version",
      status: "note",
      found: "the server has no /version",
    });
  else checks.add("version", { title: "version", status: "ok", found: vllmVersion });

  const model = await readModel(server, checks);
  const { cacheSettings, queueTime } = await readMetrics(server, checks);
  const wallClockMs = await readWallClock(server);
  const remotePrefill =
    ask && model !== undefined ? await askForBlocks(role, server, checks) : undefined;
  const facts = { vllmVersion, model, cacheSettings, queueTime, wallClockMs, remotePrefill };
  return { facts, checks: checks.all };
}

async function readModel(server: EngineServer, checks: ServerChecks): Promise<HttpFacts["model"]> {
  const title = "model";
  try {
    const model = await server.model();
    const root =
      model.root === undefined || model.root === model.id ? "" : `, started as "${model.root}"`;
    checks.add("model", {
      title,
      status: "ok",
      found: `"${model.id}"${root}`,
      details: { ...model },
    });
    return model;
  } catch (error) {
    const found = (error as Error).message;
    checks.add("model", { title, status: "fail", found, fix: "check the server's /v1/models" });
    return undefined;
  }
}

const QUEUE_TIME = "vllm:request_queue_time_seconds";

async function readMetrics(
  server: EngineServer,
  checks: ServerChecks,
): Promise<Pick<HttpFacts, "cacheSettings" | "queueTime">> {
  const title = "metrics";
  const samples = await server.metrics().catch(() => undefined);
  const failures = samples?.sum("vllm:nixl_num_failed_transfers_total") ?? 0;
  const expired = samples?.sum("vllm:nixl_num_kv_expired_reqs_total") ?? 0;
  if (samples === undefined)
    checks.add("metrics", { title, status: "note", found: "the server has no /metrics" });
  else if (failures + expired > 0) {
    checks.add("metrics", {
      title,
      status: "warn",
      found: `since the server started, ${failures} transfers failed and ${expired} requests expired before they were read`,
      fix: "see the server's log: failed transfers and handshakes have a failure_type, expired requests their id",
      details: { failures, expired },
    });
  } else
    checks.add("metrics", {
      title,
      status: "ok",
      found: "no failed transfers, no expired requests",
    });
  const p99Seconds = samples?.quantile(QUEUE_TIME, 0.99);
  return {
    cacheSettings: samples?.labels("vllm:cache_config_info"),
    queueTime:
      p99Seconds === undefined
        ? undefined
        : { requests: samples?.sum(`${QUEUE_TIME}_count`) ?? 0, p99Seconds },
  };
}

async function readWallClock(server: EngineServer): Promise<HttpFacts["wallClockMs"]> {
  const date = await server.date().catch(() => undefined);
  if (date === undefined) return undefined;
  return {
    least: date.theirsMs - date.toMs,
    most: date.theirsMs + DATE_HEADER_RESOLUTION_MS - date.fromMs,
  };
}

/** Sends a prefill request; the answer is what a decode worker would get. */
async function askForBlocks(
  role: Role,
  server: EngineServer,
  checks: ServerChecks,
): Promise<RemotePrefillParams | undefined> {
  const title = "kv_transfer_params";
  try {
    const params = readRemotePrefill(await server.prefill(PROBE_PROMPT));
    const { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode } =
      params;
    checks.add("transfer-params", {
      title,
      status: "ok",
      found: `engine ${remoteEngineId} at ${remoteHost}:${remotePort}, TP ${tpSize}${ppSize > 1 ? `, PP ${ppSize}` : ""}, ${transferMode}`,
      details: { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode },
    });
    return params;
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_REQUEST_INVALID", "kv_transfer_params");
    // A server that only decodes need not answer prefill requests.
    const isRequired = role === "prefill";
    checks.add("transfer-params", {
      title,
      status: isRequired ? "fail" : "note",
      found: error.message,
      fix: isRequired ? error.hint : undefined,
    });
    return undefined;
  }
}
