import { createHash } from "node:crypto";
import { rm } from "node:fs/promises";
import { join } from "node:path";
import {
  createConnectorWorker,
  idleWithinGrace,
  type LeaseOrder,
  type PendingReceive,
  PendingReceives,
  TaskTracker,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { KvError, type WorkerConnector, type WorkerOptions } from "@kv/interface";
import { loadBlocks, saveBlocks } from "./block-file.js";
import { FOLDER, type FolderStep, type LoadOrder } from "./step.js";

const POLL_MS = 10;

type PathOf = (engineId: string, wireId: string, capability: string | undefined) => string;

export function createFolderWorker(options: WorkerOptions): WorkerConnector {
  const { config, engine, tpRank, ppRank } = options;
  const { folder } = config.extra;
  if (typeof folder !== "string") {
    throw new KvError("KV_CONFIG_INVALID", "the connector's extra config needs folder: a path", {
      hint: '"kv_connector_extra_config": {"folder": "/shared/kv"}',
    });
  }
  // P and D have the same TP size, so a rank reads the file of the same rank.
  const pathOf: PathOf = (...names) => {
    const file = createHash("sha256").update(JSON.stringify(names)).digest("hex");
    return join(folder, `${file}.tp${tpRank}of${engine.tpSize}.pp${ppRank}`);
  };
  return createConnectorWorker<FolderStep>(options, {
    name: FOLDER,
    transferMode: "pull",
    operation: "read",
    lists: ["loads", "aborts", "drops"],
    createHalves: (context) => ({
      prefill: new PrefillHalf(context, pathOf),
      decode: new DecodeHalf(context, pathOf),
    }),
  });
}

/** P: writes a file for each request whose blocks are kept, and then gives them back. */
class PrefillHalf implements WorkerHalf<FolderStep> {
  readonly #context: WorkerContext;
  readonly #pathOf: PathOf;
  readonly #saving = new TaskTracker();

  constructor(context: WorkerContext, pathOf: PathOf) {
    this.#context = context;
    this.#pathOf = pathOf;
  }

  step({ leases, lost = [] }: FolderStep): void {
    for (const order of leases) this.#saving.track(this.#save(order));
    for (const requestId of lost) this.#context.output.sent(requestId);
  }

  outstanding() {
    return { saves: this.#saving.size };
  }

  async close(): Promise<void> {
    await idleWithinGrace(this.#context.clock, [this.#saving]);
  }

  async #save({ requestId, wireId, capability, promptBlockIds }: LeaseOrder): Promise<void> {
    const { caches, log, options, output } = this.#context;
    const path = this.#pathOf(options.engine.engineId, wireId, capability);
    try {
      await saveBlocks(path, caches, promptBlockIds[0] ?? []);
    } catch (error) {
      // D finds no file and fails at its deadline.
      log.error("folder-save-failed", { requestId, error });
    }
    output.sent(requestId);
  }
}

/** D: waits for the files. */
class DecodeHalf implements WorkerHalf<FolderStep> {
  readonly #context: WorkerContext;
  readonly #pathOf: PathOf;
  readonly #working = new TaskTracker();
  readonly #receives: PendingReceives<LoadOrder>;

  constructor(context: WorkerContext, pathOf: PathOf) {
    this.#context = context;
    this.#pathOf = pathOf;
    this.#receives = new PendingReceives<LoadOrder>(
      { ...context, tasks: this.#working, timeoutMs: context.settings.requestTimeoutMs },
      { run: (receive) => this.#load(receive) },
    );
  }

  step({ loads, aborts, drops }: FolderStep): void {
    for (const order of loads) this.#receives.start(order);
    for (const requestId of aborts) {
      const reason = new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`);
      this.#receives.abort(requestId, reason);
    }
    for (const remote of drops) this.#working.track(this.#remove(this.#fileOf({ remote })));
  }

  outstanding() {
    return { receives: this.#receives.size };
  }

  async close(reason = new KvError("KV_AGENT_CLOSED", "the worker was closed")): Promise<void> {
    for (const receive of this.#receives.values()) receive.fail(reason);
    await idleWithinGrace(this.#context.clock, [this.#working]);
  }

  #fileOf({ remote }: Pick<LoadOrder, "remote">): string {
    return this.#pathOf(remote.engineId, remote.requestId, remote.lease?.capability);
  }

  /** Ends after the last write to the request's blocks, also when it was aborted. */
  async #load({ order, signal }: PendingReceive<LoadOrder>): Promise<void> {
    const { caches, clock } = this.#context;
    const { localBlockIds, localComputedBlocks } = order;
    const path = this.#fileOf(order);
    while (!(await loadBlocks(path, caches, localBlockIds[0] ?? [], localComputedBlocks[0] ?? 0))) {
      signal.throwIfAborted();
      await new Promise<void>((resolve) => void clock.setTimer(resolve, POLL_MS, { ref: true }));
    }
  }

  async #remove(path: string): Promise<void> {
    try {
      await rm(path, { force: true });
    } catch (error) {
      this.#context.log.error("folder-remove-failed", { path, error });
    }
  }
}
