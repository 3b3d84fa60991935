import { KvError } from "@kv/interface";
import { parseTransferParams, type RemotePrefillParams } from "@kv/protocol";
import type { Check } from "../report/check.js";
import type { EngineServer } from "../server/server.js";
import type { Role, Side } from "./side.js";

export type HttpFacts = Pick<Side, "vllmVersion" | "model" | "cacheSettings" | "wallClockMs" | "told">;

export const NO_HTTP_FACTS: HttpFacts = {
  vllmVersion: undefined,
  model: undefined,
  cacheSettings: undefined,
  wallClockMs: undefined,
  told: undefined,
};

/** As few tokens as a prompt may have: a block of the server's cache is kept until it is told, or for a lease. */
const PROBE_PROMPT = [20, 30];
const HEADER_RESOLUTION_MS = 1000;

/** Asks a server over HTTP what it is and where its side channel is. `ask`: whether it may be given a prompt. */
export async function lookHttp(
  role: Role,
  server: EngineServer,
  ask: boolean,
): Promise<{ facts: HttpFacts; checks: Check[] }> {
  const checks: Check[] = [];
  const add = (id: string, rest: Omit<Check, "id" | "area">) =>
    checks.push({ id: `${role}.${id}`, area: role, ...rest });
  try {
    await server.health();
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", server.url);
    const fix = error.hint ?? "start the server, or wait until it is healthy";
    add("http", { title: "HTTP", status: "fail", found: error.message, fix });
    return { facts: NO_HTTP_FACTS, checks };
  }
  add("http", { title: "HTTP", status: "ok", found: `${server.url} is healthy` });

  const vllmVersion = await server.version().catch(() => undefined);
  if (vllmVersion === undefined)
    add("version", { title: "version", status: "note", found: "it has no /version" });
  else add("version", { title: "version", status: "ok", found: vllmVersion });

  const model = await server.model().catch((error: unknown) => {
    add("model", {
      title: "model",
      status: "fail",
      found: (error as Error).message,
      fix: "look at /v1/models",
    });
    return undefined;
  });
  if (model !== undefined) {
    const root = model.root === undefined || model.root === model.id ? "" : `, started as "${model.root}"`;
    add("model", { title: "model", status: "ok", found: `"${model.id}"${root}`, details: { ...model } });
  }

  const samples = await server.metrics().catch(() => undefined);
  const cacheSettings = samples?.labels("vllm:cache_config_info");
  const failures = samples?.sum("vllm:nixl_num_failed_transfers_total") ?? 0;
  const expired = samples?.sum("vllm:nixl_num_kv_expired_reqs_total") ?? 0;
  if (samples === undefined)
    add("metrics", { title: "metrics", status: "note", found: "it has no /metrics" });
  else if (failures + expired > 0) {
    add("metrics", {
      title: "metrics",
      status: "warn",
      found: `since its start ${failures} transfers failed and ${expired} requests expired before they were read`,
      fix: "its log names each: failed transfers and handshakes by failure_type, expired ones by request id",
      details: { failures, expired },
    });
  } else
    add("metrics", { title: "metrics", status: "ok", found: "no failed transfers, no expired requests" });

  const wallClockMs = await wallClock(server);
  const told = ask && model !== undefined ? await keep(role, server, add) : undefined;
  return { facts: { vllmVersion, model, cacheSettings, wallClockMs, told }, checks };
}

async function wallClock(server: EngineServer): Promise<HttpFacts["wallClockMs"]> {
  const date = await server.date().catch(() => undefined);
  if (date === undefined) return undefined;
  return { least: date.theirsMs - date.toMs, most: date.theirsMs + HEADER_RESOLUTION_MS - date.fromMs };
}

/** Has the server compute a prompt for a peer: its answer is what a decode worker would get. */
async function keep(
  role: Role,
  server: EngineServer,
  add: (id: string, check: Omit<Check, "id" | "area">) => void,
): Promise<RemotePrefillParams | undefined> {
  const title = "kv_transfer_params";
  try {
    const params = parseTransferParams(await server.prefill(PROBE_PROMPT));
    if (params.kind !== "remote-prefill") {
      throw new KvError("KV_REQUEST_INVALID", "its kv_transfer_params name no remote prefill");
    }
    const { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode } = params;
    add("transfer-params", {
      title,
      status: "ok",
      found: `engine ${remoteEngineId} at ${remoteHost}:${remotePort}, TP ${tpSize}${ppSize > 1 ? `, PP ${ppSize}` : ""}, ${transferMode}`,
      details: { remoteEngineId, remoteHost, remotePort, tpSize, ppSize, dcpSize, transferMode },
    });
    return params;
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_REQUEST_INVALID", "kv_transfer_params");
    // A server that only decodes need not answer as a prefill worker.
    const status = role === "prefill" ? "fail" : "note";
    add("transfer-params", {
      title,
      status,
      found: error.message,
      ...(status === "note" || error.hint === undefined ? {} : { fix: error.hint }),
    });
    return undefined;
  }
}
