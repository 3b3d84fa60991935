import { createHash } from "node:crypto";
import { isObject } from "@kv/http";
import { KvError, type SideChannel } from "@kv/interface";
import {
  type AgentMetadata,
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  searchHashFactors,
} from "@kv/protocol";
import { z } from "zod";
import type { Role } from "../instances/instance.js";
import { hasMla } from "./plan-pair.js";

export interface EngineFacts {
  /** Each start has a new one. */
  readonly engineId: string;
  /** Digest of the metadata, with the NIXL agent's name and memory addresses. */
  readonly identity: string;
  readonly compatibilityHash: string;
  /** Of rank (0, 0), without the transport's part. */
  readonly metadata: AgentMetadata;
  /** By vLLM's names: announced (engines of this project), or found by a search. */
  readonly factors: Readonly<Record<string, unknown>> | undefined;
  readonly vllmVersion: string | undefined;
  readonly models: readonly string[];
  readonly tpSize: number | undefined;
  readonly mode: "pull" | "push" | undefined;
  /** False for engines that announce more than vLLM does. */
  readonly isVllm: boolean;
}

/** One GET at an instance, or a POST. */
export interface InstanceGetRequest {
  readonly role: Role;
  readonly url: string;
  readonly path: string;
  /** JSON, which makes it a POST. */
  readonly post?: string | undefined;
  readonly timeoutMs: number;
}

/** Resolves with the status and the first bytes of the body. */
export type InstanceGet = (
  request: InstanceGetRequest,
) => Promise<{ readonly status: number; readonly body: string }>;

export interface SideChannelAddress {
  /** An IPv6 address has no brackets. */
  readonly host: string;
  readonly port: number;
}

export interface ReadEngineOptions {
  readonly instance: { readonly role: Role; readonly url: string };
  readonly address: SideChannelAddress;
  readonly sideChannel: SideChannel;
  readonly get: InstanceGet;
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
}

const MAX_ID_LENGTH = 512;

/**
 * Shakes hands with rank (0, 0), and asks the HTTP server for version and model, which may stay
 * unknown. It asks no other rank: vLLM 0.33's listener stops for good at a rank that does not
 * exist.
 *
 * @throws `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`, `KV_HANDSHAKE_UNTRUSTED`,
 * `KV_HANDSHAKE_REFUSED`, `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export async function readEngineFacts(options: ReadEngineOptions): Promise<EngineFacts> {
  const { address, sideChannel, timeoutMs, signal } = options;
  const { frames } = await sideChannel.request({
    ...address,
    frames: [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })],
    timeoutMs,
    signal,
  });
  const refusal = decodeHandshakeRefusal(frames);
  if (refusal !== undefined) {
    throw new KvError(
      "KV_HANDSHAKE_REFUSED",
      `the engine at ${address.host}:${address.port} refused: ${refusal}`,
    );
  }
  const { payload } = decodeHandshakeReply(frames);
  const metadata = {
    ...decodeAgentMetadata(payload.agentMetadataBytes),
    agentMetadata: new Uint8Array(0),
  };
  for (const [name, text] of [
    ["engine_id", metadata.engineId],
    ["compatibility_hash", payload.compatibilityHash],
  ] as const) {
    if (text.length > MAX_ID_LENGTH)
      throw new KvError(
        "KV_WIRE_LIMIT_EXCEEDED",
        `handshake reply: ${name} has ${text.length} characters`,
      );
  }
  const [version, models] = await Promise.all([
    readJson(options, "/version", versionSchema),
    readJson(options, "/v1/models", modelsSchema),
  ]);
  const factors = announcedFactors(payload.extension?.["factors"], payload.compatibilityHash);
  return {
    engineId: metadata.engineId,
    identity: createHash("sha256").update(payload.agentMetadataBytes).digest("base64"),
    compatibilityHash: payload.compatibilityHash,
    metadata,
    factors,
    vllmVersion: version?.version,
    models: (models?.data ?? [])
      .slice(0, 4)
      .flatMap(({ root, id }) => [root, id])
      .filter((one) => one !== undefined),
    tpSize: undefined,
    mode: modeIn(factors),
    isVllm: payload.extension === undefined,
  };
}

export function modeIn(factors: EngineFacts["factors"]): EngineFacts["mode"] {
  const mode = factors?.["transfer_mode"];
  return mode === "pull" || mode === "push" ? mode : undefined;
}

function announcedFactors(announced: unknown, hash: string): EngineFacts["factors"] {
  return isObject(announced) && compatibilityHash(announced) === hash ? announced : undefined;
}

const name = z.string().max(MAX_ID_LENGTH).optional().catch(undefined);
const versionSchema = z.object({ version: z.string().max(64) });
const modelsSchema = z.object({ data: z.array(z.object({ root: name, id: name })) });

/** Undefined for any other answer: version and models only explain misfits. */
async function readJson<S extends z.ZodType>(
  { instance: { role, url }, get, timeoutMs }: ReadEngineOptions,
  path: string,
  schema: S,
): Promise<z.output<S> | undefined> {
  try {
    const { status, body } = await get({ role, url, path, timeoutMs });
    return status === 200 ? schema.parse(JSON.parse(body)) : undefined;
  } catch {
    return undefined;
  }
}

/** Bytes of `remote_block_ids` on all ranks; undefined if unknown. */
export function kvBytesOf(facts: EngineFacts, blockIds: unknown): number | undefined {
  if (!Array.isArray(blockIds)) return undefined;
  const groups = Array.isArray(blockIds[0]) ? (blockIds as unknown[]) : [blockIds];
  const counts = groups.map((ids) => (Array.isArray(ids) ? ids.length : 0));
  const all = counts.reduce((sum, count) => sum + count, 0);
  const { blockLengthsBytes, regionGroupIds, physicalBlocksPerLogical } = facts.metadata;
  let bytes = 0;
  for (const [region, lengthBytes] of blockLengthsBytes.entries())
    bytes += lengthBytes * (counts[regionGroupIds?.[region] ?? 0] ?? all);
  // With MLA, each rank holds the same bytes; ranks of a DCP group hold different tokens of a block.
  const { dcpSize } = facts.metadata;
  const ranks = hasMla(facts.metadata) ? dcpSize : (facts.tpSize ?? 1);
  return bytes * physicalBlocksPerLogical * ranks;
}

const searched = new WeakSet<EngineFacts>();

export function mayFindFactors(facts: EngineFacts): boolean {
  return facts.factors === undefined && !searched.has(facts);
}

export async function findFactors(
  facts: EngineFacts,
  signal: AbortSignal,
): Promise<EngineFacts | undefined> {
  const search = searchHashFactors(facts.compatibilityHash, {
    vllmVersion: facts.vllmVersion,
    models: facts.models,
    metadata: facts.metadata,
    tpSize: facts.tpSize ?? 1,
    cacheDtype: undefined,
    transferMode: facts.mode,
    knownFactors: {},
  });
  let step = search.next();
  for (; step.done !== true; step = search.next()) {
    await new Promise((resolve) => setImmediate(resolve));
    if (signal.aborted) return undefined;
  }
  searched.add(facts);
  const { factors } = step.value;
  return factors === undefined
    ? undefined
    : { ...facts, factors, mode: modeIn(factors) ?? facts.mode };
}
