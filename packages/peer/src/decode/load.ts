import { type Ambient, ambient, KvError, type SideChannel, type Transport } from "@kv/interface";
import {
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  type RemotePrefillParams,
} from "@kv/protocol";
import type { EngineServer } from "../server/server.js";
import { createBlockPool } from "./block-pool.js";
import { openHeadlessDecode } from "./headless-decode.js";
import { type LeakReport, leaksAfter, usedBlocks } from "./leaks.js";
import { mirrorOf } from "./mirror.js";
import { blocksOf, type Fault, type Pulled, pullOne, readTold, receiveOne } from "./pull-one.js";
import { silentTransport } from "./silent-transport.js";

export interface LoadOptions extends Partial<Ambient> {
  readonly server: EngineServer;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  /** Lengths of prompts, taken in turn. */
  readonly promptTokens: readonly number[];
  /** Requests at a time at most. */
  readonly concurrency: number;
  /** Requests begun per second; as many as `concurrency` lets through when absent. */
  readonly ratePerSecond?: number;
  readonly durationMs?: number;
  /** Ends the load when so many were begun; without it and without `durationMs`, 20. */
  readonly requests?: number;
  /** Shares of requests that meet a fault, 0 to 1. */
  readonly abortShare?: number;
  readonly noNotifyShare?: number;
  /** The server's `kv_lease_duration`: after it, blocks that it was not told of must be free. */
  readonly leaseMs: number;
  /** How long the server may take to free what it was told of. */
  readonly freeWithinMs?: number;
  readonly leaseMarginMs?: number;
  /** Where a server that pushes finds this side; loopback and a free port unless given. */
  readonly sideChannelHost?: string;
  readonly sideChannelPort?: number;
  readonly signal?: AbortSignal;
  readonly progress?: (done: number) => void;
}

export interface LoadResult {
  readonly engineId: string;
  readonly tpSize: number;
  readonly elapsedMs: number;
  readonly pulls: readonly Pulled[];
  /** Undefined where the server's metrics do not tell: then nothing is known of leaks. */
  readonly leaks: LeakReport | undefined;
  /** What the headless side itself still held at the end: zeros, or a defect of ours. */
  readonly outstanding: Readonly<Record<string, number>>;
}

const DEFAULT_REQUESTS = 20;
const FREE_WITHIN_MS = 20_000;

/**
 * Sends prompts to a prefill server, reads their KV, and looks at what the server still holds afterwards. Errors: those of the first
 * request, by which the server's cache becomes known; later ones are counted.
 */
export async function load(options: LoadOptions): Promise<LoadResult> {
  const { server, concurrency, promptTokens } = options;
  const around = ambient(options);
  const { clock, random } = around;
  const before = await usedBlocks(server);

  // The first prompt says where the cache is, and how many blocks the longest takes.
  const longest = Math.max(...promptTokens);
  const params = await server.prefill(promptOf(longest, random));
  const told = readTold(params);
  const { metadata, compatibilityHash } = await handshakeOf(told, options.sideChannel);
  const kernels = metadata.physicalBlocksPerLogical;
  const numBlocks = 1 + blocksOf(told) * concurrency;
  const { sideChannelHost, sideChannelPort } = options;
  const mirror = mirrorOf(metadata, told, {
    engineId: `kv-peer-${random.uuid()}`,
    numBlocks,
    sideChannelHost,
    sideChannelPort,
  });
  const silenced = new Set<string>();
  const transport = silentTransport(options.transport, (text) =>
    silenced.has(text.slice(0, text.lastIndexOf(":"))),
  );
  const { sideChannel } = options;
  const decode = await openHeadlessDecode({
    ...{ ...mirror, ...around, transport, sideChannel },
    announcedHash: compatibilityHash,
  });
  const perRank = mirror.regions.reduce((sum, { blockLengthBytes }) => sum + blockLengthBytes * kernels, 0);
  const pulls: Pulled[] = [];
  const beganMs = clock.now();
  const one = {
    server,
    decode,
    pool: createBlockPool(numBlocks),
    clock,
    random,
    beganMs,
    blockLengthBytes: perRank * told.tpSize,
    logicalBlockKernels: kernels,
    regions: mirror.regions.length,
    keepSilent: (id: string) => void silenced.add(id),
    ...(options.signal === undefined ? {} : { signal: options.signal }),
  };
  const isPush = told.transferMode === "push";
  const tell = { requestId: "kv-peer-first", numPromptTokens: longest, kvTransferParams: params };
  try {
    // A server that pushes frees by what it has written: there is no word by which it can be told to.
    if (isPush)
      await receiveOne({ promptTokens: longest, fault: undefined, abortAfterMs: 0 }, params, told, one);
    else decode.giveUpQueued(tell);
    await inTurn(options, clock, async (n) => {
      const tokens = promptTokens[n % promptTokens.length] ?? 1;
      pulls.push(
        await pullOne(
          {
            requestId: `kv-peer-${random.uuid()}`,
            prompt: promptOf(tokens, random),
            promptTokens: tokens,
            fault: faultOf(random.next(), options),
            abortAfterMs: random.next() * MAX_ABORT_AFTER_MS,
          },
          one,
        ),
      );
      options.progress?.(pulls.length);
    });
    const elapsedMs = clock.now() - beganMs;
    // Of a prompt that was given up before it was offered blocks, a server that pushes hears nothing either.
    const unnotified = pulls.filter(
      ({ fault, outcome }) => fault === "no-notify" || (isPush && outcome === "aborted"),
    );
    const leaks = await leaksAfter({
      server,
      clock,
      before,
      unnotifiedBlocks: unnotified.reduce((sum, { serverBlocks }) => sum + serverBlocks, 0),
      leaseMs: options.leaseMs,
      freeWithinMs: options.freeWithinMs ?? FREE_WITHIN_MS,
      ...(options.leaseMarginMs === undefined ? {} : { leaseMarginMs: options.leaseMarginMs }),
    });
    const { engineId } = metadata;
    return { engineId, tpSize: told.tpSize, elapsedMs, pulls, leaks, outstanding: decode.outstanding() };
  } finally {
    await decode.close();
  }
}

/** A read of a local peer takes some ms: most aborts meet it under way. */
const MAX_ABORT_AFTER_MS = 8;

function faultOf(chance: number, { abortShare = 0, noNotifyShare = 0 }: LoadOptions): Fault | undefined {
  if (chance < abortShare) return "abort";
  return chance < abortShare + noNotifyShare ? "no-notify" : undefined;
}

/** Token ids that every vocabulary has, and no two prompts alike, so that no prefix cache answers. */
function promptOf(tokens: number, random: Ambient["random"]): readonly number[] {
  return Array.from({ length: tokens }, () => 10 + Math.floor(random.next() * 900));
}

export async function handshakeOf(told: RemotePrefillParams, sideChannel: SideChannel, tpRank = 0) {
  const { frames } = await sideChannel.request({
    host: told.remoteHost,
    port: told.remotePort,
    frames: [encodeHandshakeRequest({ ppRank: 0, tpRank })],
    timeoutMs: 5000,
  });
  const { compatibilityHash, agentMetadataBytes } = decodeHandshakeReply(frames).payload;
  return { compatibilityHash, metadata: decodeAgentMetadata(agentMetadataBytes) };
}

/** Runs `work` with n = 0, 1, … at the rate and the concurrency that were asked for, until time, number or signal ends it. */
async function inTurn(
  { concurrency, ratePerSecond, durationMs, requests, signal }: LoadOptions,
  clock: Ambient["clock"],
  work: (n: number) => Promise<void>,
): Promise<void> {
  const most = requests ?? (durationMs === undefined ? DEFAULT_REQUESTS : Number.POSITIVE_INFINITY);
  const beganMs = clock.now();
  const endMs = durationMs === undefined ? Number.POSITIVE_INFINITY : beganMs + durationMs;
  let begun = 0;
  const isOver = () => begun >= most || clock.now() >= endMs || signal?.aborted === true;
  async function one(): Promise<void> {
    while (!isOver()) {
      const n = begun++;
      if (ratePerSecond !== undefined) {
        const waitMs = beganMs + (n * 1000) / ratePerSecond - clock.now();
        if (waitMs > 0) await new Promise<void>((resolve) => clock.setTimer(resolve, waitMs, { ref: true }));
        if (clock.now() >= endMs || signal?.aborted === true) return;
      }
      await work(n);
    }
  }
  if (concurrency < 1)
    throw new KvError("KV_CONFIG_INVALID", `concurrency is ${concurrency}, not at least 1`);
  await Promise.all(Array.from({ length: concurrency }, one));
}
