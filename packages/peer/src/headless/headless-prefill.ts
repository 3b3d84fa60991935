import { hasStates } from "@kv/fleet";
import {
  ambient,
  type BlockIds,
  type ConnectorModule,
  type KvCacheKind,
  KvError,
  type KvTransferParams,
  type WorkerOutput,
} from "@kv/interface";
import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
import { type GivenGroups, groupKinds } from "../protocol/cache-groups.js";
import { kernelBlocksOfRegion } from "../protocol/region-blocks.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import type { RecordedHandshake, RecordedPrompt, Recording } from "../recording/recording.js";
import { BlockPool, splitByGroup } from "./block-pool.js";
import { HeadlessEngine, type Reach } from "./headless-engine.js";
import { type MatchingSettings, matchingSettings } from "./matching-decode.js";

/** Options of `openHeadlessPrefill`. */
export interface HeadlessPrefillOptions extends Reach {
  /** The prompts that are served, with their KV, and the server that is imitated. */
  readonly recording: Recording;
  /** How long blocks are kept for a D, in ms (vLLM: `kv_lease_duration`). */
  readonly leaseMs: number;
  /** Logical blocks of the cache, the null block included. */
  readonly numBlocks: number;
  /**
   * Serve a prompt that was not recorded with the KV of a recorded one of at least its length. For
   * load tests; answers are meaningless.
   */
  readonly anyPrompt?: boolean | undefined;
  /**
   * The kind of each KV cache group, for a server that pushes. @default those of the recording, or
   * of its handshake where that says them
   */
  readonly groups?: GivenGroups | undefined;
  /** Sends the KV. @default the connector of the recorded server, pull or push */
  readonly connector?: ConnectorModule | undefined;
}

interface Parts {
  readonly engine: HeadlessEngine;
  readonly options: HeadlessPrefillOptions;
  readonly settings: MatchingSettings;
  readonly handshakes: readonly RecordedHandshake[];
  readonly pool: BlockPool;
  /** Blocks by request id, until D has read them or the lease ends. */
  readonly kept: Map<string, readonly number[]>;
}

/** A prefill engine without a model: it serves the recorded KV of recorded prompts. */
export class HeadlessPrefill {
  readonly #parts: Parts;

  constructor(parts: Parts) {
    this.#parts = parts;
  }

  /**
   * Writes the recorded KV of `tokens` into free blocks, keeps these for D, and resolves with
   * `kv_transfer_params` for D.
   *
   * @throws `KV_REQUEST_INVALID` for a prompt that was not recorded, `KV_OUT_OF_BLOCKS`,
   * `KV_CONFIG_INVALID` for a damaged recording.
   */
  async prefill(requestId: string, tokens: readonly number[]): Promise<KvTransferParams> {
    const prompt = this.#findPrompt(tokens);
    const recordedIds = readRemotePrefill(prompt.params).remoteBlockIds;
    const blocks = Math.ceil(tokens.length / this.blockSize);
    const lengths = recordedIds.map((ids) => Math.min(ids.length, blocks));
    const taken = await this.#takeBlocks(lengths.reduce((sum, length) => sum + length, 0));
    this.#parts.kept.set(requestId, taken);
    const blockIds = splitByGroup(taken, lengths);
    this.#copyIn(await this.#parts.options.recording.kv(prompt), blockIds, recordedIds);
    return this.#keepForDecode(requestId, tokens, blockIds);
  }

  /** Tokens in a logical block. */
  get blockSize(): number {
    return this.#parts.settings.cache.blockSize;
  }

  /** Logical blocks: `total` with the null block, `used` by requests. */
  get blocks(): { readonly total: number; readonly used: number } {
    const { numBlocks } = this.#parts.options;
    return { total: numBlocks, used: numBlocks - 1 - this.#parts.pool.free };
  }

  /**
   * What the scheduler connector still holds, by name, and `held`: requests whose blocks are kept.
   */
  outstanding(): Readonly<Record<string, number>> {
    return { ...this.#parts.engine.scheduler.outstanding(), held: this.#parts.kept.size };
  }

  /** Closes the connectors and frees the cache. The transport and the side channel stay open. */
  close(): Promise<void> {
    return this.#parts.engine.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #findPrompt(tokens: readonly number[]): RecordedPrompt {
    const { prompts } = this.#parts.options.recording.manifest;
    const same = prompts.find((prompt) => sameTokens(prompt.tokens, tokens));
    const [longer] = prompts
      .filter((prompt) => prompt.tokens.length >= tokens.length)
      .sort((a, b) => a.tokens.length - b.tokens.length);
    const found = same ?? (this.#parts.options.anyPrompt === true ? longer : undefined);
    if (found !== undefined) return found;
    const lengths = prompts.map((prompt) => prompt.tokens.length).join(", ");
    throw new KvError(
      "KV_REQUEST_INVALID",
      `this prompt of ${tokens.length} tokens was not recorded; the recorded prompts have ${lengths} tokens`,
      { hint: "send a prompt of manifest.json, or start with --any-prompt" },
    );
  }

  async #takeBlocks(count: number): Promise<readonly number[]> {
    if (this.#parts.pool.free >= count) return await this.#parts.pool.take(count);
    throw new KvError(
      "KV_OUT_OF_BLOCKS",
      `the prompt needs ${count} blocks, and ${this.#parts.pool.free} of ${this.#parts.options.numBlocks - 1} are free`,
      { hint: "wait until decode workers have read their blocks, or raise --blocks" },
    );
  }

  /**
   * Copies the recorded bytes, which lie rank after rank and region after region, into the
   * request's blocks.
   */
  #copyIn(bytes: Uint8Array, blockIds: BlockIds, recordedIds: BlockIds): void {
    let offset = 0;
    for (const [tpRank, { metadata }] of this.#parts.handshakes.entries()) {
      for (const [region, { blockLengthBytes }] of this.#parts.settings.regions.entries()) {
        const targets = kernelBlocksOfRegion(metadata, region, blockIds);
        for (const index of kernelBlocksOfRegion(metadata, region, recordedIds).keys()) {
          const target = targets[index];
          if (target !== undefined) {
            const source = bytes.subarray(offset, offset + blockLengthBytes);
            this.#parts.engine.block(tpRank, region, target).set(source);
          }
          offset += blockLengthBytes;
        }
      }
    }
  }

  /** Takes the connector through the steps of a request that ends after its prefill. */
  #keepForDecode(
    requestId: string,
    tokens: readonly number[],
    blockIds: BlockIds,
  ): KvTransferParams {
    const { scheduler } = this.#parts.engine;
    const request = {
      requestId,
      numPromptTokens: tokens.length,
      promptTokenIds: tokens,
      kvTransferParams: { do_remote_decode: true, do_remote_prefill: false },
    };
    scheduler.matchedTokens(request, 0);
    scheduler.afterAllocation(request, blockIds, 0);
    this.#parts.engine.step();
    const { kvTransferParams } = scheduler.requestFinished(request, blockIds, "length");
    this.#parts.engine.step();
    if (kvTransferParams !== undefined) return kvTransferParams;
    throw new KvError("KV_INTERNAL", "the connector did not keep the blocks of a prefill request");
  }
}

function freeSent(
  { finishedSending }: WorkerOutput,
  pool: BlockPool,
  kept: Map<string, readonly number[]>,
) {
  for (const id of finishedSending) {
    pool.give(kept.get(id) ?? []);
    kept.delete(id);
  }
}

function sameTokens(one: readonly number[], other: readonly number[]): boolean {
  return one.length === other.length && one.every((token, index) => token === other[index]);
}

/**
 * @throws those of `groupKinds`; `KV_PLAN_UNSUPPORTED` for states, because the parts of a state,
 * which D's ranks share, are not on the wire.
 */
function pushedGroups(
  metadata: AgentMetadata,
  { remoteBlockIds }: RemotePrefillParams,
  { groups, recording }: HeadlessPrefillOptions,
): readonly KvCacheKind[] {
  if (hasStates(metadata)) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `the recorded server pushes states of ${metadata.ssmSizes.join(" + ")} bytes, whose parts for each rank of a D a handshake does not carry`,
      { hint: "record a server that pulls (NixlConnector) and serve that recording" },
    );
  }
  return groupKinds(metadata, remoteBlockIds.length, groups ?? recording.manifest.groups);
}

/**
 * Opens a prefill engine without a model that serves a recording: a worker connector per recorded
 * rank and a handshake listener.
 *
 * @throws `KV_CONFIG_INVALID` for a recording without all of its ranks; those of the connector, the
 * transport and the side channel.
 */
export async function openHeadlessPrefill(
  options: HeadlessPrefillOptions,
): Promise<HeadlessPrefill> {
  const { recording, numBlocks } = options;
  const { manifest } = recording;
  const environment = ambient(options);
  const handshakes = await recording.handshakes(manifest.prefill);
  const [rank0] = handshakes;
  const [prompt0] = manifest.prompts;
  if (rank0 === undefined || prompt0 === undefined || handshakes.length !== manifest.tpSize) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `the recording in ${recording.folder} has handshakes of ${handshakes.length} ranks, but its tpSize is ${manifest.tpSize}`,
    );
  }
  const remote = readRemotePrefill(prompt0.params);
  const settings = matchingSettings(rank0.metadata, remote, {
    ...options,
    log: environment.log,
    engineId: `kv-peer-prefill-${environment.random.uuid()}`,
    // A push connector splits blocks between D's ranks; a pull connector leaves that to D.
    groups:
      remote.transferMode === "push" ? pushedGroups(rank0.metadata, remote, options) : undefined,
  });
  const pool = new BlockPool(numBlocks);
  const kept = new Map<string, readonly number[]>();
  const engine = await HeadlessEngine.open({
    ...settings,
    ...environment,
    // One rank per recorded handshake.
    engine: { ...settings.engine, tpSize: manifest.tpSize },
    transport: options.transport,
    sideChannel: options.sideChannel,
    // D expects the hash of the recorded server.
    announcedHash: rank0.payload.compatibilityHash,
    keepExtension: false,
    fill: 0,
    onOutput: (output) => freeSent(output, pool, kept),
  });
  return new HeadlessPrefill({ engine, options, settings, handshakes, pool, kept });
}
