import { cpuPlatform, createWorkerOutputAggregator, readTransferConfig } from "@kv/connector";
import {
  type Ambient,
  ambient,
  type BlockIds,
  type ConnectorModule,
  KvError,
  type KvTransferParams,
  type Memory,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { announceHash } from "../announce-hash.js";
import { createBlockPool } from "../decode/block-pool.js";
import { mirrorOf } from "../decode/mirror.js";
import { readTold } from "../decode/pull-one.js";
import { blocksOfRegion } from "../recording/blocks-of-region.js";
import type { RecordedPrompt } from "../recording/manifest.js";
import type { Recording } from "../recording/recording.js";

export interface HeadlessPrefillOptions extends Partial<Ambient> {
  readonly recording: Recording;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  /** Where decode workers shake hands; port 0 takes a free one. */
  readonly sideChannelHost: string;
  readonly sideChannelPort: number;
  readonly leaseMs: number;
  /** Logical blocks of the cache. */
  readonly numBlocks: number;
  /** Serves a prompt that was not recorded with the KV of one that is at least as long: for loads, not for answers. */
  readonly anyPrompt?: boolean;
  /** The one that the recorded server had unless another is given. */
  readonly connector?: ConnectorModule;
}

/** A prefill engine without a model: its prompts are those of a recording, and so is their KV. */
export interface HeadlessPrefill {
  /** Answers `kv_transfer_params` for a prompt whose blocks are kept now. Errors: `KV_REQUEST_INVALID`, `KV_OUT_OF_BLOCKS`. */
  prefill(requestId: string, tokens: readonly number[]): Promise<KvTransferParams>;
  readonly blocks: { readonly total: number; readonly used: number };
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

export async function openHeadlessPrefill(options: HeadlessPrefillOptions): Promise<HeadlessPrefill> {
  const { recording, transport, sideChannel, numBlocks } = options;
  const { manifest } = recording;
  const around = ambient(options);
  const handshakes = await recording.handshakes(manifest.prefill);
  const [rank0] = handshakes;
  const [prompt0] = manifest.prompts;
  if (rank0 === undefined || prompt0 === undefined || handshakes.length !== manifest.tpSize) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${recording.folder} has ${handshakes.length} ranks, and is of TP ${manifest.tpSize}`,
    );
  }
  const mirror = mirrorOf(rank0.metadata, readTold(prompt0.params), {
    engineId: `kv-peer-prefill-${around.random.uuid()}`,
    numBlocks,
    // One that pushes plans the cut; one that is read has none to make.
    isCut: true,
  });
  const connector = options.connector ?? mirror.connector;
  const config = readTransferConfig(
    {
      kv_connector: connector.name,
      kv_role: "kv_producer",
      kv_buffer_device: "cpu",
      // Whoever pushes asks the decode engine too, and its hash is the recorded one's; ours is not.
      kv_connector_extra_config: {
        kv_lease_duration: options.leaseMs / 1000,
        enforce_handshake_compat: false,
      },
    },
    {
      env: {
        VLLM_NIXL_SIDE_CHANNEL_HOST: options.sideChannelHost,
        VLLM_NIXL_SIDE_CHANNEL_PORT: String(options.sideChannelPort),
      },
      log: around.log,
    },
  );
  const shared = { config, engine: mirror.engine, sideChannel, ...around };
  const offsets: number[] = [];
  let lengthBytes = 0;
  for (const region of mirror.regions) {
    offsets.push(lengthBytes);
    lengthBytes += region.numBlocks * region.blockLengthBytes;
  }
  const memories: Memory[] = [];
  const workers: WorkerConnector[] = [];
  for (let tpRank = 0; tpRank < manifest.tpSize; tpRank++) {
    const memory = transport.allocate(lengthBytes);
    memories.push(memory);
    const worker = await connector.createWorker({
      ...shared,
      tpRank,
      ppRank: 0,
      transport,
      platform: cpuPlatform(),
    });
    workers.push(worker);
    await worker.registerKvCaches({
      config: mirror.cache,
      regions: mirror.regions.map((region, index) => ({
        ...region,
        memory,
        offsetBytes: offsets[index] ?? 0,
        blockStrideBytes: region.blockLengthBytes,
        memoryType: memory.memoryType,
      })),
    });
  }
  const scheduler = await connector.createScheduler({ ...shared, cache: mirror.cache });
  // Its decode workers expect the digest that the recorded server had; what it was made of is not known here.
  await scheduler.setHandshakeMetadata(
    await Promise.all(
      workers.map(async (worker) => {
        return announceHash(await worker.handshakeMetadata(), rank0.payload.compatibilityHash, {
          own: false,
        });
      }),
    ),
  );

  const pool = createBlockPool(numBlocks);
  const held = new Map<string, readonly number[]>();
  const aggregator = createWorkerOutputAggregator({ workers: workers.length });
  function step(): void {
    const metadata = scheduler.buildStepMetadata();
    for (const worker of workers) worker.startLoad(metadata);
  }
  for (const [rank, worker] of workers.entries()) {
    worker.onProgress(() => {
      const output = aggregator.add({ tpRank: rank }, worker.collectFinished());
      scheduler.applyWorkerOutput(output);
      for (const id of output.finishedSending) {
        pool.give(held.get(id) ?? []);
        held.delete(id);
      }
      step();
    });
  }

  function find(tokens: readonly number[]): RecordedPrompt {
    const same = manifest.prompts.find((prompt) => isSame(prompt.tokens, tokens));
    const longer = manifest.prompts
      .filter((prompt) => prompt.tokens.length >= tokens.length)
      .sort((a, b) => a.tokens.length - b.tokens.length)[0];
    const found = same ?? (options.anyPrompt === true ? longer : undefined);
    if (found !== undefined) return found;
    const lengths = manifest.prompts.map((prompt) => prompt.tokens.length).join(", ");
    throw new KvError(
      "KV_REQUEST_INVALID",
      `a prompt of ${tokens.length} tokens was not recorded; recorded are prompts of ${lengths}`,
      {
        hint: "send one of manifest.json, or start with --any-prompt",
      },
    );
  }

  /** Puts a rank's recorded blocks where the request's are now. */
  function place(bytes: Uint8Array, blockIds: BlockIds, recorded: BlockIds): void {
    let offset = 0;
    for (const [tpRank, { metadata }] of handshakes.entries()) {
      for (const [region, { blockLengthBytes }] of mirror.regions.entries()) {
        const here = blocksOfRegion(metadata, region, blockIds);
        for (const index of blocksOfRegion(metadata, region, recorded).keys()) {
          const id = here[index];
          const source = bytes.subarray(offset, offset + blockLengthBytes);
          if (id !== undefined)
            memories[tpRank]?.bytes.set(source, (offsets[region] ?? 0) + id * blockLengthBytes);
          offset += blockLengthBytes;
        }
      }
    }
  }

  return {
    async prefill(requestId, tokens) {
      const prompt = find(tokens);
      const recorded = readTold(prompt.params).remoteBlockIds;
      const blocks = Math.ceil(tokens.length / mirror.cache.blockSize);
      const shape = recorded.map((ids) => Math.min(ids.length, blocks));
      const wanted = shape.reduce((sum, length) => sum + length, 0);
      if (pool.free < wanted) {
        throw new KvError(
          "KV_OUT_OF_BLOCKS",
          `${wanted} blocks are needed, ${pool.free} of ${numBlocks - 1} are free`,
          {
            hint: "let decode workers read, or raise --blocks",
          },
        );
      }
      const taken = await pool.take(wanted);
      held.set(requestId, taken);
      let from = 0;
      const blockIds = shape.map((length) => {
        from += length;
        return taken.slice(from - length, from);
      });
      place(await recording.kv(prompt), blockIds, recorded);
      const request = {
        requestId,
        numPromptTokens: tokens.length,
        kvTransferParams: { do_remote_decode: true, do_remote_prefill: false },
      };
      scheduler.matchedTokens(request, 0);
      scheduler.afterAllocation(request, blockIds, 0);
      step();
      const { kvTransferParams } = scheduler.requestFinished(request, blockIds, "length");
      step();
      if (kvTransferParams !== undefined) return kvTransferParams;
      throw new KvError("KV_INTERNAL", "the connector kept no blocks of a prompt");
    },
    get blocks() {
      return { total: numBlocks, used: numBlocks - 1 - pool.free };
    },
    outstanding: () => ({ ...scheduler.outstanding(), held: held.size }),
    async close() {
      await scheduler.close();
      for (const worker of workers) await worker.close();
      for (const memory of memories) memory.close();
    },
  };
}

function isSame(one: readonly number[], other: readonly number[]): boolean {
  return one.length === other.length && one.every((token, index) => token === other[index]);
}
