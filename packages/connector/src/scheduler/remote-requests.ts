import { hash } from "node:crypto";
import { type BlockIds, type Clock, KvError, type KvTransferParams } from "@kv/interface";
import {
  blocksDigest,
  parseTransferParams,
  type RemotePrefillParams,
  type TransferMode,
} from "@kv/protocol";
import { addressOf, type EngineAddress, engineKey } from "../handshake/engine-address.js";
import { traceMember } from "../tracing/spans.js";
import { OldestFirst } from "./oldest-first.js";
import {
  type HeartbeatChange,
  type HeartbeatRequest,
  heartbeatKey,
  heartbeatRequest,
  type RemoteRequest,
} from "./step-types.js";

// The requests at P's, as D's scheduler side knows them: read from `kv_transfer_params`, each with
// its readers here, and those whose leases are extended.

/**
 * Reads the P that computes a request's prompt, and the other values of `kv_transfer_params`. A
 * missing mode is the connector's own mode. `numPromptTokens` bounds P's tokens and the block ids:
 * a block holds at least one token. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
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
  };
  return { remote, parsed };
}

/**
 * P computes no more than the prompt, so a D with fewer tokens has another prompt, such as a
 * placeholder; so has a P with fewer tokens than the D that it reads back from. vLLM reads the last
 * blocks then, and answers from the KV of other tokens. Errors: `KV_REQUEST_INVALID` with both
 * numbers.
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

/** Block 0 may occur often: vLLM puts its null block where a sliding window has no block. */
const NULL_BLOCK = 0;

/**
 * Errors: `KV_REQUEST_INVALID` for more blocks than the prompt has tokens, and for a block that a
 * group names twice.
 */
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

/**
 * The P to notify that a request's blocks will not be used, after its parameters were refused.
 * Undefined when the parameters contain no valid address.
 */
export function addressToNotify(
  params: KvTransferParams,
  mode: TransferMode,
): RemoteRequest | undefined {
  const { remote_block_ids: blockIds } = params;
  const addressOnly = {
    ...params,
    // As in `keyOf`: where P has named blocks, their reference has no transfer id.
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

/** Options of `RemoteReferences`. */
export interface RemoteReferencesOptions {
  readonly clock: Clock;
  /** How long a released reference is refused, in ms: at least P's lease. */
  readonly rememberMs: number;
  /** Requests that may share a reference. */
  readonly maxReaders: number;
  /** References in use and released ones together. @default 262,144 */
  readonly maxReferences?: number | undefined;
}

/** A reference and the requests of this engine that read it. */
export interface RemoteReference {
  readonly key: string;
  readonly registrationGeneration: number;
  readers: number;
  /** When the last reader was done. */
  releasedAtMs: number;
}

/**
 * The references to blocks at P's, each with its readers at this engine. A vLLM P frees the blocks
 * with the first notification of this engine, and one of `@kv` too, so P is notified when the last
 * reader is done. From then on the reference is refused: P may have given the blocks to another
 * request, and a READ of them succeeds all the same (vllm-project/vllm#52234, #43509).
 */
export class RemoteReferences {
  readonly #options: RemoteReferencesOptions;
  readonly #inUse = new Map<string, RemoteReference>();
  readonly #released = new OldestFirst<string, RemoteReference>();

  constructor(options: RemoteReferencesOptions) {
    this.#options = options;
  }

  /**
   * Adds a reader of a reference, and returns what `remove` takes. Errors: `KV_REFERENCE_USED` for
   * one that this engine has released, or that has as many readers as it may have;
   * `KV_REFERENCES_FULL` for a new one when there is no room to remember it.
   */
  add(remote: RemoteRequest): RemoteReference {
    this.#forgetOld();
    const key = keyOf(remote);
    const { maxReaders, maxReferences = 262_144 } = this.#options;
    const released = this.#released.get(key);
    if (released !== undefined) {
      if (isSameRegistration(released, remote)) throw usedError(remote, "has released them");
      // P has registered its cache again since then, so the id names another use of its blocks.
      this.#released.delete(key);
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
    const reference = { key, registrationGeneration, readers: 1, releasedAtMs: 0 };
    this.#inUse.set(key, reference);
    return reference;
  }

  /**
   * Removes a reader. Returns true for the last one: P is to be notified, and the reference is
   * refused from now on.
   */
  remove(reference: RemoteReference): boolean {
    const { key } = reference;
    // A later registration of P's cache has replaced it: there is nobody to notify.
    if (this.#inUse.get(key) !== reference) return false;
    reference.readers -= 1;
    if (reference.readers > 0) return false;
    reference.releasedAtMs = this.#options.clock.now();
    this.#inUse.delete(key);
    this.#released.set(key, reference);
    return true;
  }

  /** Forgets all references. */
  clear(): void {
    this.#inUse.clear();
    this.#released.clear();
  }

  #forgetOld(): void {
    const horizonMs = this.#options.clock.now() - this.#options.rememberMs;
    for (let { oldest } = this.#released; oldest !== undefined; { oldest } = this.#released) {
      if (oldest.value.releasedAtMs > horizonMs) break;
      this.#released.delete(oldest.key);
    }
  }
}

/**
 * Names one use of a request's blocks; short also where the ids are long. Another address of the
 * same engine is the same reference. A transfer id counts only where P has not named blocks yet.
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

/**
 * A vLLM P counts how often it has registered its cache; parameters without the number (0) may be
 * of any registration.
 */
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

/** A request of an engine in the set. */
interface Listed {
  readonly engine: ListedEngine;
  readonly request: HeartbeatRequest;
  /** How many of D's requests name it: a client may send one answer of P twice. */
  count: number;
  /** Whether the workers have it. */
  isSent: boolean;
}

/**
 * The address names no registration of the engine's cache: heartbeats need no memory of the engine,
 * and one request must not decide for the others.
 */
interface ListedEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Listed>;
}

/** The requests whose leases D extends. The workers get what has changed since the last step. */
export class HeartbeatSet {
  readonly #engines = new Map<string, ListedEngine>();
  /** Requests that came or went since the last `take`. */
  readonly #touched = new Set<Listed>();
  #size = 0;

  /** Adds a request that waits or transfers. */
  add(remote: RemoteRequest): void {
    const key = engineKey(remote);
    let engine = this.#engines.get(key);
    if (engine === undefined) {
      engine = { address: addressOf(remote), requests: new Map() };
      this.#engines.set(key, engine);
    }
    const request = heartbeatRequest(remote);
    const name = heartbeatKey(request);
    let extended = engine.requests.get(name);
    if (extended === undefined) {
      extended = { engine, request, count: 0, isSent: false };
      engine.requests.set(name, extended);
    }
    extended.count += 1;
    this.#size += 1;
    this.#touched.add(extended);
  }

  /** Removes a request that was added. */
  remove(remote: RemoteRequest): void {
    const engine = this.#engines.get(engineKey(remote));
    const extended = engine?.requests.get(heartbeatKey(heartbeatRequest(remote)));
    if (extended === undefined || extended.count === 0) return;
    extended.count -= 1;
    this.#size -= 1;
    this.#touched.add(extended);
  }

  /** Whether the workers have an older set. */
  get hasChanged(): boolean {
    for (const { count, isSent } of this.#touched) if (count > 0 !== isSent) return true;
    return false;
  }

  /** Returns the changes since the last call, one entry per engine. */
  take(): HeartbeatChange[] {
    const changes = new Map<ListedEngine, { begin: HeartbeatRequest[]; end: HeartbeatRequest[] }>();
    for (const extended of this.#touched) {
      const { engine, request, count, isSent } = extended;
      if (count > 0 !== isSent) {
        const change = changes.get(engine) ?? { begin: [], end: [] };
        changes.set(engine, change);
        change[isSent ? "end" : "begin"].push(request);
        extended.isSent = !isSent;
      }
      if (count > 0) continue;
      engine.requests.delete(heartbeatKey(request));
      if (engine.requests.size === 0) this.#engines.delete(engineKey(engine.address));
    }
    this.#touched.clear();
    return [...changes].map(([{ address }, change]) => ({ ...address, ...change }));
  }

  /** Number of requests in the set. */
  get size(): number {
    return this.#size;
  }

  /** Forgets all requests. */
  clear(): void {
    this.#engines.clear();
    this.#touched.clear();
    this.#size = 0;
  }
}
