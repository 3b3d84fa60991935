import { hash } from "node:crypto";
import { type BlockIds, type Clock, KvError, type KvTransferParams } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import {
  blocksDigest,
  isWireSafeRequestId,
  newCapability,
  type PromptPrefix,
  parseTransferParams,
  type RemoteLease,
  type RemotePrefillParams,
  type TransferMode,
} from "@kv/protocol";
import { handshakeSourceRanks, handshakeTargetRanks } from "@kv/topology";

interface Entry<Key, Value> {
  readonly key: Key;
  readonly value: Value;
  older: Entry<Key, Value> | undefined;
  newer: Entry<Key, Value> | undefined;
}

/** A map that finds its oldest entry at once; a `Map`'s iteration first passes deleted entries. */
export class OldestFirst<Key, Value> {
  readonly #entries = new Map<Key, Entry<Key, Value>>();
  #oldest: Entry<Key, Value> | undefined;
  #newest: Entry<Key, Value> | undefined;

  set(key: Key, value: Value): void {
    this.delete(key);
    const entry: Entry<Key, Value> = { key, value, older: this.#newest, newer: undefined };
    if (this.#newest === undefined) this.#oldest = entry;
    else this.#newest.newer = entry;
    this.#newest = entry;
    this.#entries.set(key, entry);
  }

  get(key: Key): Value | undefined {
    return this.#entries.get(key)?.value;
  }

  has(key: Key): boolean {
    return this.#entries.has(key);
  }

  delete(key: Key): boolean {
    const entry = this.#entries.get(key);
    if (entry === undefined) return false;
    const { older, newer } = entry;
    if (older === undefined) this.#oldest = newer;
    else older.newer = newer;
    if (newer === undefined) this.#newest = older;
    else newer.older = older;
    // An old-generation entry would keep its neighbours until V8's next full collection.
    entry.older = entry.newer = undefined;
    return this.#entries.delete(key);
  }

  get oldest(): { readonly key: Key; readonly value: Value } | undefined {
    return this.#oldest;
  }

  get size(): number {
    return this.#entries.size;
  }

  clear(): void {
    this.#entries.clear();
    this.#oldest = undefined;
    this.#newest = undefined;
  }
}

/** Keys that expire, bounded in time and number. Recognises messages that come late or twice. */
export class ExpiringSet {
  readonly #options: {
    readonly clock: Clock;
    readonly ttlMs: number;
    readonly maxSize: number;
  };
  readonly #addedAtMs = new OldestFirst<string, number>();

  /** Keys stay for `ttlMs` after their last `add`. Beyond `maxSize`, the oldest leave first. */
  constructor(options: {
    readonly clock: Clock;
    readonly ttlMs: number;
    readonly maxSize: number;
  }) {
    this.#options = options;
  }

  add(key: string): void {
    this.#addedAtMs.set(key, this.#options.clock.now());
    for (let { oldest } = this.#addedAtMs; oldest !== undefined; { oldest } = this.#addedAtMs) {
      if (this.#addedAtMs.size <= this.#options.maxSize && this.#isLive(oldest.value)) break;
      this.#addedAtMs.delete(oldest.key);
    }
  }

  /** False for a key removed to make room. */
  has(key: string): boolean {
    const atMs = this.#addedAtMs.get(key);
    return atMs !== undefined && this.#isLive(atMs);
  }

  clear(): void {
    this.#addedAtMs.clear();
  }

  #isLive(atMs: number): boolean {
    return this.#options.clock.now() - atMs < this.#options.ttlMs;
  }
}

export interface Generation {
  readonly requestId: string;
  /**
   * The id in notifications and heartbeats: the engine's, as in vLLM, unless it is too long, would
   * be misparsed, or may still get notifications of an earlier use.
   */
  readonly wireId: string;
  readonly generation: number;
  /** Proves that a peer may act on the request. */
  readonly capability: string;
}

/** Keeps heartbeats of a few hundred requests short. vLLM's ids have about 60 characters. */
const MAX_WIRE_ID_LENGTH = 160;

/**
 * Numbers the uses of a request's blocks. A use lasts until the blocks return to the engine;
 * afterwards they may hold another request's KV, so its references are stale.
 */
export class Generations {
  readonly #clock: Clock;
  readonly #rememberMs: number;
  readonly #byRequestId = new OldestFirst<string, Generation>();
  readonly #byWireId = new Map<string, Generation>();
  readonly #endedAtMs = new OldestFirst<string, number>();
  #last = 0;

  /** `rememberMs`: must outlast notifications under way. */
  constructor({
    clock,
    rememberMs = 600_000,
  }: { readonly clock: Clock; readonly rememberMs?: number | undefined }) {
    this.#clock = clock;
    this.#rememberMs = rememberMs;
  }

  begin(requestId: string): Generation {
    const current = this.#byRequestId.get(requestId);
    if (current !== undefined) return current;
    this.#forgetOld();
    let wireId: string;
    do {
      this.#last += 1;
      wireId = this.#wireIdOf(requestId);
    } while (this.#byWireId.has(wireId));
    const generation: Generation = {
      requestId,
      wireId,
      generation: this.#last,
      capability: newCapability(),
    };
    this.#byRequestId.set(requestId, generation);
    this.#byWireId.set(wireId, generation);
    return generation;
  }

  end(requestId: string): void {
    const current = this.#byRequestId.get(requestId);
    if (current === undefined) return;
    this.#byRequestId.delete(requestId);
    this.#byWireId.delete(current.wireId);
    this.#endedAtMs.set(requestId, this.#clock.now());
  }

  get oldestOpen(): number | undefined {
    return this.#byRequestId.oldest?.value.generation;
  }

  byRequestId(requestId: string): Generation | undefined {
    return this.#byRequestId.get(requestId);
  }

  byWireId(wireId: string): Generation | undefined {
    return this.#byWireId.get(wireId);
  }

  clear(): void {
    this.#byRequestId.clear();
    this.#byWireId.clear();
    this.#endedAtMs.clear();
  }

  get size(): number {
    return this.#byRequestId.size;
  }

  #wireIdOf(requestId: string): string {
    const isTaken = this.#endedAtMs.has(requestId) || this.#byWireId.has(requestId);
    if (!isTaken && requestId.length <= MAX_WIRE_ID_LENGTH && isWireSafeRequestId(requestId))
      return requestId;
    const start = requestId.slice(0, MAX_WIRE_ID_LENGTH / 2).replaceAll(",", "_");
    const wireId = `${start}.g${this.#last}`;
    return isWireSafeRequestId(wireId) ? wireId : `r.${wireId}`;
  }

  #forgetOld(): void {
    const horizonMs = this.#clock.now() - this.#rememberMs;
    for (let { oldest } = this.#endedAtMs; oldest !== undefined; { oldest } = this.#endedAtMs) {
      if (oldest.value > horizonMs) break;
      this.#endedAtMs.delete(oldest.key);
    }
  }
}

interface ReferencesOptions {
  readonly clock: Clock;
  /** How long a released reference is refused, in ms: at least P's lease. */
  readonly rememberMs: number;
  readonly maxReaders: number;
  /** Counts references in use and released ones. @default 262,144 */
  readonly maxReferences?: number | undefined;
}

export interface RemoteReference {
  readonly key: string;
  /** The blocks under any name; undefined where the name itself is proven. */
  readonly content: string | undefined;
  readonly registrationGeneration: number;
  readers: number;
  releasedAtMs: number;
}

/**
 * References to P's blocks with their readers here. P frees the blocks at the first notification,
 * so only the last reader sends one. Then the reference is refused: a READ of reused blocks still
 * succeeds (vllm-project/vllm#52234, #43509).
 */
export class RemoteReferences {
  readonly #options: ReferencesOptions;
  readonly #inUse = new Map<string, RemoteReference>();
  /** Of references in use and released. */
  readonly #byContent = new Map<string, RemoteReference>();
  readonly #released = new OldestFirst<string, RemoteReference>();

  constructor(options: ReferencesOptions) {
    this.#options = options;
  }

  /**
   * Adds a reader of a reference.
   * @throws `KV_REFERENCE_USED` if released here or at its limit of readers; `KV_REFERENCES_FULL`.
   */
  add(remote: RemoteRequest): RemoteReference {
    this.#forgetOld();
    const key = keyOf(remote);
    const { maxReaders, maxReferences = 262_144 } = this.#options;
    const content = contentOf(remote);
    const same = content === undefined ? undefined : this.#byContent.get(content);
    const isNamed = same?.key === key && isSameRegistration(same, remote) && same.readers > 0;
    if (same !== undefined && !isNamed)
      throw usedError(remote, `has them from request ${remote.requestId} or another name of it`);
    const released = this.#released.get(key);
    if (released !== undefined) {
      if (isSameRegistration(released, remote)) throw usedError(remote, "has released them");
      // P's new registration gives the id new blocks.
      this.#forgetReleased(released);
    }
    const known = this.#inUse.get(key);
    if (known !== undefined && isSameRegistration(known, remote)) {
      if (known.readers >= maxReaders)
        throw usedError(remote, "already gives them to another request");
      known.readers += 1;
      return known;
    }
    if (this.#inUse.size + this.#released.size >= maxReferences)
      throw fullError(remote, maxReferences);
    const { registrationGeneration = 0 } = remote;
    const reference = { key, content, registrationGeneration, readers: 1, releasedAtMs: 0 };
    this.#inUse.set(key, reference);
    if (content !== undefined) this.#byContent.set(content, reference);
    return reference;
  }

  /** True for the last reader: P is to be notified, and the reference is refused from now on. */
  remove(reference: RemoteReference): boolean {
    const { key } = reference;
    // P registered its cache again: nobody is to be notified.
    if (this.#inUse.get(key) !== reference) return false;
    reference.readers -= 1;
    if (reference.readers > 0) return false;
    reference.releasedAtMs = this.#options.clock.now();
    this.#inUse.delete(key);
    this.#released.set(key, reference);
    return true;
  }

  clear(): void {
    this.#inUse.clear();
    this.#byContent.clear();
    this.#released.clear();
  }

  #forgetReleased({ key, content = "" }: RemoteReference): void {
    this.#released.delete(key);
    if (this.#byContent.get(content)?.key === key) this.#byContent.delete(content);
  }

  #forgetOld(): void {
    const horizonMs = this.#options.clock.now() - this.#options.rememberMs;
    for (let { oldest } = this.#released; oldest !== undefined; { oldest } = this.#released) {
      if (oldest.value.releasedAtMs > horizonMs) break;
      this.#forgetReleased(oldest.value);
    }
  }
}

/**
 * A vLLM P proves no name. It gives each request its own end of the lease, so its blocks with that
 * end are one request's.
 */
function contentOf({ engineId, lease, blocks, expirySeconds }: RemoteRequest): string | undefined {
  if (lease !== undefined || blocks === undefined || expirySeconds === undefined) return undefined;
  return hash("sha256", JSON.stringify([engineId, blocks, expirySeconds]), "base64");
}

/**
 * Names one use of a request's blocks, at any address. A transfer id counts only before P names
 * blocks.
 */
function keyOf({ engineId, requestId, lease, blocks, transferId }: RemoteRequest): string {
  const { incarnation, generation, capability } = lease ?? {};
  const early = blocks === undefined && transferId !== undefined ? [transferId] : [];
  return hash(
    "sha256",
    JSON.stringify([engineId, requestId, incarnation, generation, capability, ...early]),
    "base64",
  );
}

/** 0, for parameters without the number, matches any registration. */
function isSameRegistration(
  { registrationGeneration: known }: Pick<RemoteReference, "registrationGeneration">,
  { registrationGeneration: given = 0 }: RemoteRequest,
): boolean {
  return known === given || known === 0 || given === 0;
}

function usedError({ engineId, requestId }: RemoteRequest, what: string): KvError {
  return new KvError(
    "KV_REFERENCE_USED",
    `kv_transfer_params name the blocks of request ${requestId} at engine ${engineId}, and this engine ${what}: they may hold another request's KV`,
    {
      hint: "send the prompt to a prefill worker again, and use each answer of it once",
      details: { engineId, requestId },
    },
  );
}

function fullError({ engineId, requestId }: RemoteRequest, maxReferences: number): KvError {
  return new KvError(
    "KV_REFERENCES_FULL",
    `request ${requestId} of engine ${engineId} is refused: this engine remembers ${maxReferences} references to prefilled blocks, and no more`,
    {
      hint: "send the request to another decode worker; references are forgotten some time after their lease",
      details: { maxReferences },
    },
  );
}

/** The side-channel address and parallel sizes of an engine, as plain data. */
export interface EngineAddress {
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  /**
   * Counts registrations of the KV cache. A higher number makes D repeat the handshake.
   * @default 0
   */
  readonly registrationGeneration?: number | undefined;
}

/** Includes all that a request claims, so that wrong values get an entry of their own. */
export function engineKey({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): string {
  return JSON.stringify([engineId, host, port, tpSize, dcpSize, ppSize]);
}

export function addressOf({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): EngineAddress {
  return { engineId, host, port, tpSize, dcpSize, ppSize };
}

export function describeEngine({ engineId, host, port }: EngineAddress): string {
  return `engine ${engineId} at ${host}:${port}`;
}

export type RankKey = `pp${number}tp${number}`;

/** The key of a rank. The pipeline rank defaults to 0. */
export function rankKey({
  ppRank = 0,
  tpRank,
}: {
  ppRank?: number | undefined;
  tpRank: number;
}): RankKey {
  return `pp${ppRank}tp${tpRank}`;
}

/** A request at P, as `kv_transfer_params` name it. */
export interface RemoteRequest extends EngineAddress {
  readonly requestId: string;
  /** `transfer_id`, the front end's name of the prompt. */
  readonly transferId?: string | undefined;
  /** P's process and the use of its blocks; undefined for vLLM. */
  readonly lease?: RemoteLease | undefined;
  readonly traceparent?: string | undefined;
  /** See `blocksDigest`. */
  readonly blocks?: string | undefined;
  /** End of the lease on P's clock, in s. Not from every P. */
  readonly expirySeconds?: number | undefined;
  /** The fetched prompt; undefined where D's engine does not know its tokens. */
  readonly prompt?: PromptPrefix | undefined;
}

export interface HeartbeatRequest {
  readonly requestId: string;
  readonly capability?: string | undefined;
}

/** An id may come with several capabilities, one of them right. */
export function heartbeatKey({ requestId, capability = "" }: HeartbeatRequest): string {
  return `${capability} ${requestId}`;
}

export function heartbeatRequest({ requestId, lease }: RemoteRequest): HeartbeatRequest {
  const capability = lease?.capability;
  return capability === undefined ? { requestId } : { requestId, capability };
}

/** Plain data has no undefined members. */
export function traceMember(traceparent: string | undefined): { readonly traceparent?: string } {
  return traceparent === undefined ? {} : { traceparent };
}

/**
 * Reads a request's P and the other `kv_transfer_params`. A block holds at least one token, so
 * `numPromptTokens` limits the block ids.
 * @throws `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteRequest(
  params: KvTransferParams,
  mode: TransferMode,
  numPromptTokens = Number.POSITIVE_INFINITY,
): { readonly remote: RemoteRequest; readonly parsed: RemotePrefillParams } {
  const parsed = parseTransferParams(params, mode);
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill", {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
    });
  }
  if (parsed.transferMode !== mode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "${mode}"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  requireSamePrompt(parsed.remoteNumTokens, numPromptTokens);
  requireBlocks(parsed.remoteBlockIds, numPromptTokens);
  const remote: RemoteRequest = {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration:
      parsed.lease?.registrationGeneration ?? parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    ...(parsed.transferId === undefined ? {} : { transferId: parsed.transferId }),
    lease: parsed.lease,
    ...traceMember(parsed.lease?.traceparent),
    ...(parsed.remoteBlockIds.length === 0
      ? {}
      : { blocks: blocksDigest(parsed.remoteBlockIds, parsed.remoteNumTokens) }),
    ...(parsed.remoteBlocksExpiryTime === undefined
      ? {}
      : { expirySeconds: parsed.remoteBlocksExpiryTime }),
  };
  return { remote, parsed };
}

/**
 * A source with more tokens than the reader's prompt has another prompt. vLLM then answers from the
 * KV of other tokens.
 * @throws `KV_REQUEST_INVALID`.
 */
function requireSamePrompt(remoteNumTokens: number | undefined, numPromptTokens: number): void {
  if (remoteNumTokens === undefined || remoteNumTokens <= numPromptTokens) return;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params: remote_num_tokens is ${remoteNumTokens}, and the prompt has ${numPromptTokens} tokens: the KV is that of another prompt`,
    {
      hint: "send a decode worker the prompt of the prefill request, or the prefill answer's prompt_token_ids; send a prefill worker the decode answer's parameters only with a prompt that goes on from its tokens",
      details: { key: "remote_num_tokens", remoteNumTokens, numPromptTokens },
    },
  );
}

/** vLLM's null block, which fills the places outside a sliding window. */
const NULL_BLOCK = 0;

/** @throws `KV_REQUEST_INVALID` for more blocks than tokens, or a block twice in a group. */
function requireBlocks(blockIds: BlockIds, numPromptTokens: number): void {
  for (const [group, ids] of blockIds.entries()) {
    if (ids.length > numPromptTokens) {
      throw invalidBlocks(
        group,
        `${ids.length} ids, the prompt has ${numPromptTokens} tokens and needs fewer blocks`,
      );
    }
    const seen = new Set<number>();
    for (const id of ids) {
      if (seen.has(id) && id !== NULL_BLOCK) throw invalidBlocks(group, `block ${id} twice`);
      seen.add(id);
    }
  }
}

function invalidBlocks(group: number, what: string): KvError {
  return new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params: remote_block_ids[${group}] has ${what}`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { key: "remote_block_ids", group },
    },
  );
}

/** Finds the P to notify of refused parameters, if their address is valid. */
export function addressToNotify(
  params: KvTransferParams,
  mode: TransferMode,
): RemoteRequest | undefined {
  const { remote_block_ids: blockIds } = params;
  const addressOnly = {
    ...params,
    // A reference with blocks has no transfer id, as in `keyOf`.
    ...(Array.isArray(blockIds) && blockIds.length > 0 ? { transfer_id: null } : {}),
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [],
    remote_num_tokens: null,
    remote_blocks_expiry_time: null,
  };
  try {
    return readRemoteRequest(addressOnly, mode).remote;
  } catch {
    return undefined;
  }
}

interface AskedRanks {
  readonly tpRanks: readonly number[];
  readonly notifiers: number;
  readonly refusal?: KvError;
}

/** The remote ranks that this rank deals with: all of them where the sizes do not fit. */
export function ranksToAsk(
  { tpRank, tpSize, dcpSize = 1 }: Pick<RankGeometry, "tpRank" | "tpSize" | "dcpSize">,
  remote: Pick<EngineAddress, "tpSize"> & { readonly dcpSize?: number | undefined },
  role: "prefill" | "decode",
): AskedRanks {
  const sizes = { tpSize, remoteTpSize: remote.tpSize, dcpSize, remoteDcpSize: remote.dcpSize };
  const ranksOf = role === "prefill" ? handshakeTargetRanks : handshakeSourceRanks;
  const allRanks = (size: number) => [...new Array(size).keys()];
  try {
    const tpRanks = ranksOf({ tpRank, ...sizes });
    const notifiers = allRanks(tpSize).filter((rank) =>
      ranksOf({ tpRank: rank, ...sizes }).includes(tpRanks[0] ?? 0),
    );
    return { tpRanks, notifiers: notifiers.length };
  } catch (error) {
    const refusal = KvError.from(error, "KV_TOPOLOGY_INVALID", "the sizes of two engines");
    return { tpRanks: allRanks(remote.tpSize), notifiers: tpSize, refusal };
  }
}
