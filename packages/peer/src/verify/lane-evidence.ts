import { open } from "node:fs/promises";
import { KvError, type SideChannel } from "@kv/interface";
import {
  doctorReportSchema,
  type RdmaDevice,
  rdmaDevices,
  readUcxProtocols,
  realHost,
} from "@kv/nixl";
import type { RemotePrefillParams } from "@kv/protocol";
import { z } from "zod";
import type { Role } from "../checks/report.js";
import { measureUnlimited, probeRequest } from "../doctor/memory/memory-checks.js";
import type { MeasuredTransport } from "../doctor/memory/transport-check.js";
import { readAllRanks } from "../doctor/pair-doctor.js";
import { isThisHost, readTarget } from "../doctor/target.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import { parseJson } from "../http/http-request.js";
import { readRankMetadata } from "../protocol/handshake.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import type { LaneEvidence, LoggedLanes } from "./lane-checks.js";

export interface LaneEvidenceOptions {
  readonly servers: Readonly<Record<Role, EngineServer>>;
  readonly logs: Partial<Record<Role, string | undefined>>;
  readonly hosts: Partial<Record<Role, string | undefined>>;
  readonly sideChannel: SideChannel | undefined;
}

const ROLES = ["prefill", "decode"] as const;
/** UCX prints its tables at the first transfer between two processes. */
const LOG_LIMIT_BYTES = 64 << 20;

/**
 * Reads the files about hosts, so that a wrong one is refused before a prompt is sent. The function
 * that it resolves with collects what logs, hosts and the servers' memory say about the lane.
 * Errors of both: `KV_CONFIG_INVALID` for a file that cannot be read.
 */
export async function laneEvidence({
  servers,
  logs,
  hosts,
  sideChannel,
}: LaneEvidenceOptions): Promise<() => Promise<LaneEvidence>> {
  const given: Partial<Record<Role, readonly RdmaDevice[]>> = {};
  for (const role of ROLES) {
    const [log, host] = [logs[role], hosts[role]];
    if (host !== undefined) given[role] = devicesOf(await readStart(host), host);
    if (log !== undefined) await readStart(log);
  }
  return async () => {
    const found = {
      logs: {} as Partial<Record<Role, LoggedLanes>>,
      reached: {} as Partial<Record<Role, MeasuredTransport>>,
      here: { prefill: false, decode: false },
      devices: { ...given },
    };
    for (const role of ROLES) {
      const log = logs[role];
      if (log !== undefined) found.logs[role] = readLog(await readStart(log));
      const asked = sideChannel && (await ask(servers[role]));
      // A forwarded port is on this host, and the engine that announces its own address is not.
      found.here[role] = isThisHost(asked?.remoteHost ?? readTarget(servers[role].url).host);
      if (found.here[role]) found.devices[role] ??= rdmaDevices(realHost());
      const reached = asked && (await reach(role, asked, sideChannel).catch(() => undefined));
      if (reached !== undefined) found.reached[role] = reached;
    }
    return found;
  };
}

export function readLog(text: string): LoggedLanes {
  const provider = Array.from(text.matchAll(/rails using provider=(\S+)/g)).at(-1)?.[1];
  return { protocols: readUcxProtocols(text), provider };
}

const deviceSchema = z.object({
  name: z.string(),
  efa: z.boolean(),
  link: z.string(),
  ports: z.array(z.string()),
  gigabitsPerSecond: z.number().optional(),
});

/**
 * The RDMA devices in what `kv-nixl doctor --json` printed.
 *
 * @throws `KV_CONFIG_INVALID` when it is something else.
 */
export function devicesOf(text: string, from: string): readonly RdmaDevice[] {
  const report = doctorReportSchema.safeParse(parseJson(text));
  const checks = report.data?.checks.filter(({ id }) => /^machine\.rdma(\.|$)/.test(id)) ?? [];
  if (checks.length === 0)
    throw new KvError("KV_CONFIG_INVALID", `${from} does not name the RDMA devices of a host`, {
      hint: "write it on that host: npx --no-install kv-nixl doctor --json > host.json",
    });
  return checks.flatMap(({ details }) => deviceSchema.safeParse(details).data ?? []);
}

/**
 * Where a server's engine is; undefined when it answers prefill requests without it, as a server
 * that only decodes may.
 */
function ask(server: EngineServer): Promise<RemotePrefillParams | undefined> {
  return server.prefill(PROBE_PROMPT).then(readRemotePrefill, () => undefined);
}

/**
 * Reads a server's memory from this host, over every transport that UCX has here. Undefined when it
 * cannot be read.
 *
 * @throws those of its side channel.
 */
async function reach(
  role: Role,
  remotePrefill: RemotePrefillParams,
  sideChannel: SideChannel,
): Promise<MeasuredTransport | undefined> {
  const address = { host: remotePrefill.remoteHost, port: remotePrefill.remotePort };
  const { metadata } = await readRankMetadata(sideChannel, address);
  const facts = { role, remotePrefill, metadata, address };
  const ranks = await readAllRanks(facts, { sideChannel });
  return measureUnlimited(probeRequest(facts, metadata, ranks, {}));
}

async function readStart(path: string): Promise<string> {
  try {
    await using file = await open(path);
    const { size } = await file.stat();
    const bytes = Buffer.alloc(Math.min(size, LOG_LIMIT_BYTES));
    const { bytesRead } = await file.read(bytes, 0, bytes.length, 0);
    return bytes.subarray(0, bytesRead).toString("utf8");
  } catch (error) {
    throw new KvError("KV_CONFIG_INVALID", `${path} cannot be read: ${(error as Error).message}`, {
      cause: error,
    });
  }
}
