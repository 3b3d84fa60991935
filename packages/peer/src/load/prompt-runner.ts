import {
  type Clock,
  type ConnectorRequest,
  KvError,
  type KvErrorCode,
  type KvTransferParams,
  type Random,
} from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import { type BlockPool, splitByGroup } from "../headless/block-pool.js";
import { UNWRITTEN_BYTE } from "../headless/headless-decode.js";
import type { MatchingDecode } from "../headless/matching-decode.js";
import type { NotificationFilter } from "../headless/notification-filter.js";
import type { EngineServer } from "../http/engine-server.js";
import {
  countRemoteBlocks,
  decodeRequestId,
  readRemotePrefill,
} from "../protocol/remote-prefill.js";

/**
 * A fault that is made on purpose. `abort`: the request is aborted during its READ. `no-notify`: P
 * is not notified of the READ, as when a decode worker dies.
 */
export type Fault = "abort" | "no-notify";

/** How one prompt of a load ended. */
export interface PromptResult {
  /** `aborted` only for the fault `abort`. */
  readonly outcome: "ok" | "aborted" | "failed";
  readonly fault: Fault | undefined;
  readonly code: KvErrorCode | undefined;
  readonly message: string | undefined;
  /** When the prompt was sent, in ms since the load began. */
  readonly startMs: number;
  /** From sending the prompt to the answer with `kv_transfer_params`; 0 when there was none. */
  readonly prefillMs: number;
  /** From the answer to the arrival of the KV; undefined when it did not arrive. */
  readonly pullMs: number | undefined;
  readonly promptTokens: number;
  readonly lengthBytes: number;
  /** Logical blocks that P keeps until it is notified or the lease ends. */
  readonly serverBlocks: number;
}

export interface PromptOrder {
  readonly requestId: string;
  readonly prompt: readonly number[];
  readonly fault: Fault | undefined;
  /** For the fault `abort`: how long after the start of the READ, in ms. */
  readonly abortAfterMs: number;
}

export interface PromptRunnerOptions {
  readonly server: EngineServer;
  readonly matching: Pick<MatchingDecode, "decode" | "metadata" | "settings">;
  readonly pool: BlockPool;
  readonly filter: Pick<NotificationFilter, "drop">;
  readonly clock: Clock;
  readonly random: Random;
  readonly loadStartMs: number;
  readonly signal?: AbortSignal | undefined;
}

/** Bytes at both ends of a block that are compared to see whether the block was written. */
const EDGE_BYTES = 64;

/**
 * Runs single prompts of a load: P computes, the headless decode engine receives, the blocks are
 * checked and dropped.
 */
export class PromptRunner {
  readonly #options: PromptRunnerOptions;
  readonly #blockLengthBytes: number;

  constructor(options: PromptRunnerOptions) {
    this.#options = options;
    const { decode, metadata, settings } = options.matching;
    const kernelBytes = settings.regions.reduce(
      (sum, { blockLengthBytes }) => sum + blockLengthBytes,
      0,
    );
    this.#blockLengthBytes = kernelBytes * metadata.physicalBlocksPerLogical * decode.tpSize;
  }

  /** Runs one prompt. Never rejects: a failure is a result. */
  async run(order: PromptOrder): Promise<PromptResult> {
    const { server, clock, filter, loadStartMs, signal } = this.#options;
    const { requestId, prompt, fault } = order;
    const promptTokens = prompt.length;
    const sentMs = clock.now();
    let prefillMs = 0;
    let serverBlocks = 0;
    const result = (
      rest: Pick<PromptResult, "outcome" | "pullMs"> & Partial<PromptResult>,
    ): PromptResult => ({
      fault,
      code: undefined,
      message: undefined,
      startMs: sentMs - loadStartMs,
      prefillMs,
      promptTokens,
      lengthBytes: 0,
      serverBlocks,
      ...rest,
    });
    try {
      const params = await server.prefill(prompt, { requestId, signal });
      prefillMs = clock.now() - sentMs;
      const remote = readRemotePrefill(params);
      serverBlocks = countRemoteBlocks(remote);
      if (fault === "no-notify") {
        // A P that pushes gets no registration, so it keeps the blocks until the lease ends.
        if (remote.transferMode === "push") return result({ outcome: "ok", pullMs: undefined });
        filter.drop(remote.remoteRequestId);
      }
      const readMs = clock.now();
      if (await this.receive(order, params, remote))
        return result({ outcome: "aborted", pullMs: undefined });
      return result({
        outcome: "ok",
        pullMs: clock.now() - readMs,
        lengthBytes: serverBlocks * this.#blockLengthBytes,
      });
    } catch (thrown) {
      const { code, message } = KvError.from(thrown, "KV_INTERNAL", "a request failed");
      return result({ outcome: "failed", pullMs: undefined, code, message });
    }
  }

  /**
   * Receives the KV of one prompt, checks that every block was written, and ends the request.
   * Resolves with true when it was aborted.
   *
   * @throws those of the transfer; `KV_TRANSFER_FAILED` when a block was not written.
   */
  async receive(
    order: Pick<PromptOrder, "prompt" | "fault" | "abortAfterMs">,
    params: KvTransferParams,
    remote: RemotePrefillParams,
  ): Promise<boolean> {
    const { matching, pool, clock, random } = this.#options;
    const { decode } = matching;
    const request: ConnectorRequest = {
      requestId: decodeRequestId(remote, random),
      numPromptTokens: order.prompt.length,
      promptTokenIds: order.prompt,
      kvTransferParams: params,
    };
    const taken = await pool.take(countRemoteBlocks(remote));
    const blockIds = splitByGroup(
      taken,
      remote.remoteBlockIds.map((ids) => ids.length),
    );
    const abort = new AbortController();
    const timer =
      order.fault === "abort"
        ? clock.setTimer(() => abort.abort(), order.abortAfterMs, { ref: true })
        : undefined;
    try {
      for (const edge of this.#blockEdges(taken)) edge.fill(UNWRITTEN_BYTE);
      const { failure, aborted } = await decode.receive(request, blockIds, {
        signal: abort.signal,
      });
      if (!aborted) decode.finish(request, blockIds);
      if (failure !== undefined && failure.code !== "KV_REQUEST_ABORTED")
        throw new KvError(failure.code, failure.message);
      if (aborted) return true;
      this.#checkWritten(taken);
      return false;
    } finally {
      timer?.cancel();
      pool.give(taken);
    }
  }

  /**
   * The first and the last bytes of every kernel block of these logical blocks, in every region of
   * every rank.
   */
  *#blockEdges(ids: readonly number[]): Generator<Uint8Array> {
    const { decode, metadata, settings } = this.#options.matching;
    const kernels = metadata.physicalBlocksPerLogical;
    for (let tpRank = 0; tpRank < decode.tpSize; tpRank++) {
      for (const region of settings.regions.keys()) {
        for (const id of ids) {
          for (let kernel = 0; kernel < kernels; kernel++) {
            const block = decode.block(tpRank, region, id * kernels + kernel);
            yield block.subarray(0, EDGE_BYTES);
            yield block.subarray(-EDGE_BYTES);
          }
        }
      }
    }
  }

  #checkWritten(ids: readonly number[]): void {
    let unwritten = 0;
    for (const edge of this.#blockEdges(ids))
      if (edge.every((byte) => byte === UNWRITTEN_BYTE)) unwritten += 1;
    if (unwritten === 0) return;
    throw new KvError(
      "KV_TRANSFER_FAILED",
      `the transfer was reported as complete, but ${unwritten} block edges were not written`,
      { hint: "compare the NIXL versions of both sides, run kv-peer doctor" },
    );
  }
}
