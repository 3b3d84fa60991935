import type { SideChannel } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeHandshakeRequest,
} from "@kv/protocol";
import { type Check, type PairReport, reportOf } from "../report/check.js";
import type { EngineServer } from "../server/server.js";
import { type BytesOutcome, bytesChecks, bytesQuestion } from "./bytes-checks.js";
import type { BytesQuestion } from "./bytes-probe.js";
import { compatibilityChecks } from "./compatibility-checks.js";
import { lookHttp, NO_HTTP_FACTS } from "./look-http.js";
import { lookSideChannel } from "./look-side-channel.js";
import { planChecks } from "./plan-checks.js";
import type { Role, Side } from "./side.js";
import { isLoopback, type Target } from "./target.js";
import { clockChecks, versionChecks } from "./version-checks.js";

export interface PairDoctorOptions {
  readonly prefill: Target;
  /** Without it only the prefill side is looked at. */
  readonly decode?: Target;
  readonly sideChannel: SideChannel;
  openServer(url: string): EngineServer;
  /** Moves the bytes; undefined: not asked for. */
  readonly moveBytes?: (question: BytesQuestion) => Promise<BytesOutcome>;
  readonly prefillTp?: number;
  readonly decodeTp?: number;
  /** Side channels that the user knows, `host:port`. */
  readonly sideChannels?: Readonly<Partial<Record<Role, { host: string; port: number }>>>;
  /** Whether servers may be given a prompt of two tokens: without one they do not say where their side channel is. */
  readonly ask?: boolean;
  /** Factors of the compatibility hash that the user knows, by vLLM's names. */
  readonly factors?: Readonly<Record<string, unknown>>;
  readonly timeoutMs?: number;
  readonly bytes?: {
    readonly limitBytes?: number;
    readonly write?: boolean;
    readonly backends?: readonly string[];
  };
}

/** vLLM's default: `VLLM_NIXL_SIDE_CHANNEL_PORT`. */
const DEFAULT_PORT = 5600;
/** vLLM's client waits so long for a handshake. */
const DEFAULT_TIMEOUT_MS = 5000;
const DEFAULT_LIMIT_BYTES = 64 << 20;

/** Looks at everything between two servers that decides whether KV gets from one to the other. Never throws for what it finds. */
export async function pairDoctor(options: PairDoctorOptions): Promise<PairReport> {
  const checks: Check[] = [];
  const { prefill: prefillTarget, decode: decodeTarget } = options;
  const prefill = await look("prefill", prefillTarget, decodeTarget, options, checks);
  const decode =
    decodeTarget === undefined
      ? undefined
      : await look("decode", decodeTarget, prefillTarget, options, checks);
  const sides = decode === undefined ? [prefill] : [prefill, decode];

  const tpOf = (side: Side) => {
    const given = side.role === "prefill" ? options.prefillTp : options.decodeTp;
    return given ?? side.told?.tpSize ?? 1;
  };
  if (decode !== undefined) checks.push(...versionChecks(prefill, decode));
  const compatibility = compatibilityChecks(prefill, decode, { given: options.factors ?? {}, tpOf });
  checks.push(...compatibility.checks);
  if (decode !== undefined) {
    const heads = compatibility.factors?.num_kv_heads ?? options.factors?.num_kv_heads;
    const isKnown = (given: number | undefined, side: Side) => given !== undefined || side.told !== undefined;
    checks.push(
      ...planChecks(prefill, decode, {
        prefillTp: tpOf(prefill),
        decodeTp: tpOf(decode),
        tpIsAssumed: !isKnown(options.prefillTp, prefill) || !isKnown(options.decodeTp, decode),
        numKvHeads: typeof heads === "number" ? heads : undefined,
      }),
    );
  }
  checks.push(...clockChecks(sides));
  for (const side of sides) checks.push(...(await moveBytes(side, options)));
  return reportOf(checks);
}

async function look(
  role: Role,
  target: Target,
  peer: Target | undefined,
  options: PairDoctorOptions,
  checks: Check[],
): Promise<Side> {
  let facts = NO_HTTP_FACTS;
  if (target.kind === "server") {
    const seen = await lookHttp(role, options.openServer(target.url), options.ask ?? true);
    facts = seen.facts;
    checks.push(...seen.checks);
  }
  const { told } = facts;
  const given = options.sideChannels?.[role];
  const address =
    target.kind === "side-channel"
      ? { host: target.host, port: target.port, from: "given" as const }
      : told !== undefined
        ? { host: told.remoteHost, port: told.remotePort, from: "told" as const }
        : given !== undefined
          ? { ...given, from: "given" as const }
          : { host: target.host, port: DEFAULT_PORT, from: "default" as const };
  const seen = await lookSideChannel({
    role,
    sideChannel: options.sideChannel,
    timeoutMs: options.timeoutMs ?? DEFAULT_TIMEOUT_MS,
    address,
    serverHost: target.kind === "server" ? target.host : undefined,
    peerIsElsewhere: peer !== undefined && !isLoopback(peer.host) && isLoopback(target.host),
    toldEngineId: told?.remoteEngineId,
  });
  checks.push(...seen.checks);
  return { role, target, ...facts, ...seen.found };
}

/** The prefill side is read from; the decode side is only told that blocks it kept for this check are free. */
async function moveBytes(side: Side, options: PairDoctorOptions): Promise<Check[]> {
  const { moveBytes: move, bytes = {} } = options;
  if (move === undefined) return [];
  const question = bytesQuestion(side, {
    limitBytes: bytes.limitBytes ?? DEFAULT_LIMIT_BYTES,
    write: side.role === "prefill" && bytes.write === true,
    backends: bytes.backends ?? [],
    ranks: await keepers(side, options),
  });
  return question === undefined ? [] : bytesChecks(side, await move(question));
}

/** Metadata of all ranks that a server said it has: each keeps its part of the prompt's blocks. */
async function keepers(side: Side, { sideChannel, timeoutMs }: PairDoctorOptions): Promise<AgentMetadata[]> {
  const { metadata, told, address } = side;
  if (metadata === undefined || told === undefined || address === undefined) return [];
  if (told.remoteEngineId !== metadata.engineId) return [];
  const ranks = [metadata];
  for (let tpRank = 1; tpRank < told.tpSize; tpRank++) {
    const frames = [encodeHandshakeRequest({ ppRank: 0, tpRank })];
    const reply = await sideChannel
      .request({ ...address, frames, timeoutMs: timeoutMs ?? DEFAULT_TIMEOUT_MS })
      .catch(() => undefined);
    if (reply === undefined) continue;
    try {
      ranks.push(decodeAgentMetadata(decodeHandshakeReply(reply.frames).payload.agentMetadataBytes));
    } catch {
      // Rank (0, 0) is what is checked; blocks of this one are freed when their lease ends.
    }
  }
  return ranks;
}
