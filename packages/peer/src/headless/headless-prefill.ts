import { hasStates } from "@kv/fleet";
import {
  ambient,
  type BlockIds,
  type ConnectorModule,
  type KvCacheKind,
  KvError,
  type KvTransferParams,
} from "@kv/interface";
import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
import { type GivenGroups, groupKinds, kernelBlocksOfRegion } from "../protocol/cache-groups.js";
import { readRemotePrefill } from "../protocol/remote-engine.js";
import type { RecordedHandshake, RecordedPrompt, Recording } from "../recording/recording.js";
import { BlockPool, splitByGroup } from "./block-pool.js";
import { HeadlessEngine, type Reach } from "./headless-engine.js";
import { type MatchingSettings, matchingSettings } from "./matching-decode.js";

/** Options of `openHeadlessPrefill`. */
export interface HeadlessPrefillOptions extends Reach {
  readonly recording: Recording;
  /** Lease of kept blocks in ms (vLLM: `kv_lease_duration`). */
  readonly leaseMs: number;
  /** Logical blocks, with the null block. */
  readonly numBlocks: number;
  /**
   * Serves unrecorded prompts with KV of recorded ones that are not shorter. Their answers are
   * meaningless.
   */
  readonly anyPrompt?: boolean | undefined;
  /**
   * Kinds of KV cache groups, for a server that pushes. @default those of the recording, or of its
   * handshake where that says them
   */
  readonly groups?: GivenGroups | undefined;
  /** @default the connector of the recorded server, pull or push */
  readonly connector?: ConnectorModule | undefined;
}

/** A prefill engine without a model: it serves recorded KV. */
export class HeadlessPrefill {
  readonly #options: HeadlessPrefillOptions;
  readonly #engine: HeadlessEngine;
  readonly #settings: MatchingSettings;
  readonly #handshakes: readonly RecordedHandshake[];
  readonly #pool: BlockPool;
  readonly #kept = new Map<string, readonly number[]>();

  constructor(
    options: HeadlessPrefillOptions,
    engine: HeadlessEngine,
    settings: MatchingSettings,
    handshakes: readonly RecordedHandshake[],
  ) {
    this.#options = options;
    this.#engine = engine;
    this.#settings = settings;
    this.#handshakes = handshakes;
    this.#pool = new BlockPool(options.numBlocks);
    engine.onOutput = ({ finishedSending }) => {
      for (const id of finishedSending) {
        this.#pool.give(this.#kept.get(id) ?? []);
        this.#kept.delete(id);
      }
    };
  }

  /**
   * Puts recorded KV into free blocks and returns the `kv_transfer_params` for D.
   *
   * @throws `KV_REQUEST_INVALID` for a prompt that was not recorded, `KV_OUT_OF_BLOCKS`,
   * `KV_CONFIG_INVALID` for a damaged recording.
   */
  async prefill(requestId: string, tokens: readonly number[]): Promise<KvTransferParams> {
    const prompt = this.#findPrompt(tokens);
    const recordedIds = readRemotePrefill(prompt.params).remoteBlockIds;
    const blocks = Math.ceil(tokens.length / this.blockSize);
    const lengths = recordedIds.map((ids) => Math.min(ids.length, blocks));
    const count = lengths.reduce((sum, length) => sum + length, 0);
    if (this.#pool.free < count)
      throw new KvError(
        "KV_OUT_OF_BLOCKS",
        `the prompt needs ${count} blocks, and ${this.#pool.free} of ${this.#options.numBlocks - 1} are free`,
        { hint: "wait until decode workers have read their blocks, or raise --blocks" },
      );
    const taken = await this.#pool.take(count);
    this.#kept.set(requestId, taken);
    const blockIds = splitByGroup(taken, lengths);
    this.#copyIn(await this.#options.recording.kv(prompt), blockIds, recordedIds);
    return this.#keepForDecode(requestId, tokens, blockIds);
  }

  get blockSize(): number {
    return this.#settings.cache.blockSize;
  }

  /** With the null block in `total`. */
  get blocks(): { readonly total: number; readonly used: number } {
    const { numBlocks } = this.#options;
    return { total: numBlocks, used: numBlocks - 1 - this.#pool.free };
  }

  /** What the scheduler connector holds, by name; `held`: requests whose blocks are kept. */
  outstanding(): Readonly<Record<string, number>> {
    return { ...this.#engine.scheduler.outstanding(), held: this.#kept.size };
  }

  /** The transport and the side channel stay open. */
  close(): Promise<void> {
    return this.#engine.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #findPrompt(tokens: readonly number[]): RecordedPrompt {
    const { prompts } = this.#options.recording.manifest;
    const wanted = tokens.join();
    const same = prompts.find((prompt) => prompt.tokens.join() === wanted);
    const [longer] = prompts
      .filter((prompt) => prompt.tokens.length >= tokens.length)
      .sort((a, b) => a.tokens.length - b.tokens.length);
    const found = same ?? (this.#options.anyPrompt ? longer : undefined);
    if (found !== undefined) return found;
    const lengths = prompts.map((prompt) => prompt.tokens.length).join(", ");
    throw new KvError(
      "KV_REQUEST_INVALID",
      `this prompt of ${tokens.length} tokens was not recorded; the recorded prompts have ${lengths} tokens`,
      { hint: "send a prompt of manifest.json, or start with --any-prompt" },
    );
  }

  #copyIn(bytes: Uint8Array, blockIds: BlockIds, recordedIds: BlockIds): void {
    let offset = 0;
    for (const [tpRank, { metadata }] of this.#handshakes.entries()) {
      for (const [region, { blockLengthBytes }] of this.#settings.regions.entries()) {
        const targets = kernelBlocksOfRegion(metadata, region, blockIds);
        for (const index of kernelBlocksOfRegion(metadata, region, recordedIds).keys()) {
          const target = targets[index];
          if (target !== undefined) {
            const source = bytes.subarray(offset, offset + blockLengthBytes);
            this.#engine.block(tpRank, region, target).set(source);
          }
          offset += blockLengthBytes;
        }
      }
    }
  }

  #keepForDecode(
    requestId: string,
    tokens: readonly number[],
    blockIds: BlockIds,
  ): KvTransferParams {
    const { scheduler } = this.#engine;
    const request = {
      requestId,
      numPromptTokens: tokens.length,
      promptTokenIds: tokens,
      kvTransferParams: { do_remote_decode: true, do_remote_prefill: false },
    };
    scheduler.matchedTokens(request, 0);
    scheduler.afterAllocation(request, blockIds, 0);
    this.#engine.step();
    const { kvTransferParams } = scheduler.requestFinished(request, blockIds, "length");
    this.#engine.step();
    if (kvTransferParams !== undefined) return kvTransferParams;
    throw new KvError("KV_INTERNAL", "the connector did not keep the blocks of a prefill request");
  }
}

/**
 * @throws those of `groupKinds`; `KV_PLAN_UNSUPPORTED` for states, whose parts for D's ranks are
 * not on the wire.
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
 * Serves a recording, with a worker per rank and a handshake listener.
 *
 * @throws `KV_CONFIG_INVALID` for a recording without all of its ranks; those of the connector, the
 * transport and the side channel.
 */
export async function openHeadlessPrefill(
  options: HeadlessPrefillOptions,
): Promise<HeadlessPrefill> {
  const { recording } = options;
  const { manifest } = recording;
  const { log, random } = ambient(options);
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
    log,
    engineId: `kv-peer-prefill-${random.uuid()}`,
    // A push connector splits blocks between D's ranks; in pull, D does.
    groups:
      remote.transferMode === "push" ? pushedGroups(rank0.metadata, remote, options) : undefined,
  });
  const engine = await HeadlessEngine.open({
    ...options,
    ...settings,
    engine: { ...settings.engine, tpSize: manifest.tpSize },
    // D expects the recorded server's hash.
    announcedHash: rank0.payload.compatibilityHash,
    keepExtension: false,
    fill: 0,
  });
  return new HeadlessPrefill(options, engine, settings, handshakes);
}
