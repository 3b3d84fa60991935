import {
  type BlockIds,
  type Clock,
  type KvCaches,
  KvError,
  type Log,
  type Platform,
  type StagedBlocks,
  type Staging,
  type StepMetadata,
  type Tracer,
  type Transport,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOutput,
} from "@kv/interface";
import { groupBlockTokens } from "@kv/plan";
import { noOutput, withUnverified } from "../worker/connector-worker.js";

/** Orders from the scheduler side under `staging` in the step's metadata. */
export interface StagingOrders {
  /** P: running requests, whose blocks are copied into the pool as they are computed. */
  saves: StagedRequest[];
  /** P: requests with nothing more to copy; their pool blocks wait for readers. */
  saved: string[];
  /** D: requests whose KV goes into the pool and then to the device. */
  loads: StagedRequest[];
  over: string[];
}

/** Pairs device blocks with pool blocks per KV cache group. */
export interface StagedRequest extends StagedBlocks {
  readonly requestId: string;
  readonly numTokens: number;
  readonly traceparent?: string | undefined;
}

/** One request's copies in one step. */
export interface StagingCopied {
  readonly requestId: string;
  /** `save`: device to pool, on P. `load`: pool to device, on D. */
  readonly direction: "save" | "load";
  /** Per KV cache group. */
  readonly wire: BlockIds;
  /** From the start of the first copy to the end of the last. */
  readonly durationMs: number;
}

export interface StagedWorkerOptions {
  readonly platform: Platform;
  readonly transport: Transport;
  readonly poolBlocks: number;
  readonly clock: Clock;
  readonly log: Log;
  readonly tracer: Tracer | undefined;
  readonly onCopied?: ((copied: StagingCopied) => void) | undefined;
}

interface Save {
  readonly order: StagedRequest;
  /** Copied so far of the tokens that the engine has named. Only full blocks are copied. */
  savedTokens: number;
  /** The engine's last number; undefined before, and after a call that omits the request. */
  named: number | undefined;
}

const COPIES = {
  save: { span: "kv.stage_save", what: "saving" },
  load: { span: "kv.stage_load", what: "loading" },
} as const;

/**
 * The worker side with staging: the inner connector registers the pool. A received request is
 * reported when it is on the device.
 */
export class StagedWorker implements WorkerConnector {
  readonly name: string;
  readonly #inner: WorkerConnector;
  readonly #options: StagedWorkerOptions;
  readonly #listeners: (() => void)[] = [];
  readonly #saves = new Map<string, Save>();
  readonly #loads = new Map<string, StagedRequest>();
  /** A second report (no longer at risk) is passed on. */
  readonly #reported = new Set<string>();
  readonly #loading = new Map<string, Promise<void>>();
  readonly #unverified = new Set<string>();
  #output = noOutput();
  #blockTokens: readonly number[] = [];
  #staging: Staging | undefined;

  constructor(inner: WorkerConnector, options: StagedWorkerOptions) {
    this.name = inner.name;
    this.#inner = inner;
    this.#options = options;
    // The copy need not wait for the engine's next step.
    inner.onProgress(() => {
      this.#land();
      if (Object.values(this.#output).some(({ length }) => length > 0)) this.#progress();
    });
  }

  async registerKvCaches(caches: KvCaches): Promise<void> {
    const { platform, transport, poolBlocks, clock } = this.#options;
    if (this.#staging !== undefined)
      throw new KvError("KV_INTERNAL", "registerKvCaches was called before");
    if (platform.createStaging === undefined) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `platform ${platform.deviceType} has no staging`,
      );
    }
    const { config } = caches;
    this.#blockTokens = groupBlockTokens(config);
    this.#staging = await platform.createStaging({ transport, config, caches, poolBlocks, clock });
    await this.#inner.registerKvCaches(this.#staging.wireCaches);
  }

  handshakeMetadata(): Promise<WorkerHandshakeMetadata> {
    return this.#inner.handshakeMetadata();
  }

  startLoad(step: StepMetadata): void {
    const { saves = [], saved = [], loads = [], over = [] } = stagingOrders(step) ?? {};
    for (const requestId of over) {
      this.#saves.delete(requestId);
      this.#loads.delete(requestId);
      this.#reported.delete(requestId);
    }
    for (const requestId of saved) this.#saved(requestId);
    for (const order of saves)
      this.#saves.set(order.requestId, { order, savedTokens: 0, named: undefined });
    for (const order of loads) {
      this.#loads.set(order.requestId, order);
      this.#reported.delete(order.requestId);
    }
    this.#inner.startLoad(step);
  }

  async waitForSave(
    step: StepMetadata,
    computed?: Readonly<Record<string, number>>,
  ): Promise<void> {
    const saves = [...this.#saves.values()];
    const errors = await Promise.all(saves.map((save) => this.#save(save, computed)));
    const failed = saves.filter((_, index) => errors[index] !== undefined);
    const first = errors.find((error) => error !== undefined);
    if (first !== undefined) {
      throw new KvError("KV_STAGING_FAILED", first.message, {
        cause: first,
        details: { requestIds: failed.map(({ order }) => order.requestId) },
      });
    }
    await this.#inner.waitForSave(step, computed);
  }

  collectFinished(): WorkerOutput {
    this.#land();
    const output = this.#output;
    this.#output = noOutput();
    return withUnverified(output, this.#unverified);
  }

  onProgress(listener: () => void): void {
    this.#listeners.push(listener);
  }

  outstanding(): Readonly<Record<string, number>> {
    return {
      ...this.#inner.outstanding(),
      saves: this.#saves.size,
      loads: this.#loads.size,
      loading: this.#loading.size,
      reported: this.#reported.size + this.#unverified.size,
    };
  }

  async close(): Promise<void> {
    // First the transport forgets the pool. Copies under way keep their memory.
    await this.#inner.close();
    await Promise.all(this.#loading.values());
    await this.#staging?.close();
    this.#staging = undefined;
  }

  #progress(): void {
    for (const listener of this.#listeners) listener();
  }

  /** P: without word of the last tokens, peers read blocks too early. */
  #saved(requestId: string): void {
    const { named, savedTokens = 0, order } = this.#saves.get(requestId) ?? {};
    this.#saves.delete(requestId);
    if (order === undefined || named === undefined || savedTokens >= order.numTokens) return;
    const { numTokens } = order;
    this.#options.log.error("staging-save-incomplete", { requestId, savedTokens, numTokens });
  }

  /**
   * P: copies newly computed blocks. A request that `computed` leaves out has no new tokens; one
   * that it never named has all of them, as has every request without `computed`.
   */
  async #save(
    save: Save,
    computed: Readonly<Record<string, number>> | undefined,
  ): Promise<KvError | undefined> {
    const { order, savedTokens } = save;
    const { requestId, numTokens } = order;
    const named = computed && (computed[requestId] ?? save.named);
    save.named = named;
    const tokens = Math.min(named ?? numTokens, numTokens);
    const begun = named === undefined ? 0 : savedTokens;
    if (tokens <= begun) return undefined;
    // A partial block waits until it is full or the prompt ends.
    const end = tokens === numTokens ? Math.ceil : Math.floor;
    const cut = (ids: BlockIds) =>
      ids.map((group, index) => {
        const each = this.#blockTokens[index] ?? 1;
        return group.slice(Math.floor(begun / each), end(tokens / each));
      });
    const wire = cut(order.wire);
    if (wire.every((ids) => ids.length === 0)) return undefined;
    const error = await this.#copy("save", order, { device: cut(order.device), wire });
    // A guess is copied again when the engine names the request.
    if (error === undefined && named !== undefined) save.savedTokens = tokens;
    return error;
  }

  #land(): void {
    const landed = this.#inner.collectFinished();
    const output = this.#output;
    for (const failure of landed.failedReceiving) {
      const { blockIds } = failure;
      output.failedReceiving.push(
        blockIds === undefined ? failure : { ...failure, blockIds: this.#onDevice(blockIds) },
      );
    }
    output.failedBlockIds.push(...this.#onDevice(landed.failedBlockIds));
    output.finishedSending.push(...landed.finishedSending);
    for (const requestId of landed.unverifiedReceiving ?? []) this.#unverified.add(requestId);
    for (const requestId of landed.finishedReceiving) {
      const order = this.#loads.get(requestId);
      const hasFailed = landed.failedReceiving.some((failure) => failure.requestId === requestId);
      const lands = order !== undefined && !hasFailed && !this.#reported.has(requestId);
      if (order !== undefined) this.#reported.add(requestId);
      if (lands) this.#loading.set(requestId, this.#load(order));
      else output.finishedReceiving.push(requestId);
    }
  }

  async #load(order: StagedRequest): Promise<void> {
    const { requestId, device } = order;
    const error = await this.#copy("load", order, order);
    const output = this.#output;
    if (error !== undefined) {
      const { code, message } = error;
      this.#options.log.warn("staging-load-failed", { requestId, code, error: message });
      const blockIds = device.length === 1 ? [...(device[0] ?? [])] : [];
      const failureType = "transfer_exception";
      output.failedReceiving.push({ requestId, code, message, failureType, blockIds });
      output.failedBlockIds.push(...blockIds);
    }
    this.#loading.delete(requestId);
    output.finishedReceiving.push(requestId);
    this.#progress();
  }

  #onDevice(wireIds: readonly number[]): number[] {
    if (wireIds.length === 0) return [];
    const devices = new Map<number, number>();
    for (const { device, wire } of this.#loads.values()) {
      wire[0]?.forEach((id, index) => {
        const deviceId = device[0]?.[index];
        if (deviceId !== undefined) devices.set(id, deviceId);
      });
    }
    return wireIds.flatMap((id) => devices.get(id) ?? []);
  }

  async #copy(
    direction: StagingCopied["direction"],
    { requestId, traceparent: parent }: StagedRequest,
    blocks: StagedBlocks,
  ): Promise<KvError | undefined> {
    const { clock, tracer, onCopied } = this.#options;
    const { wire } = blocks;
    const startedMs = clock.now();
    const attributes = { "kv.blocks": wire.flat().length };
    const span = tracer?.start(COPIES[direction].span, { parent, attributes });
    try {
      if (this.#staging === undefined) {
        throw new KvError(
          "KV_INTERNAL",
          "the worker connector has no KV caches yet, or is closed",
          { hint: "await registerKvCaches first" },
        );
      }
      await this.#staging[direction](requestId, blocks);
      span?.end();
      onCopied?.({ requestId, direction, wire, durationMs: clock.now() - startedMs });
      return undefined;
    } catch (error) {
      span?.end(error);
      const what = `${COPIES[direction].what} request ${requestId}`;
      return KvError.from(error, "KV_STAGING_FAILED", what);
    }
  }
}

/** @throws `KV_INTERNAL` when the key holds anything else. */
function stagingOrders(step: StepMetadata): StagingOrders | undefined {
  const { staging } = step;
  if (staging === undefined) return undefined;
  const { saves, saved, loads, over } = (staging ?? {}) as Partial<StagingOrders>;
  if ([saves, saved, loads, over].every(Array.isArray)) return staging as StagingOrders;
  throw new KvError(
    "KV_INTERNAL",
    `step ${step.step}: its metadata has something else under "staging"`,
    { hint: "put staged() of the same version around both sides" },
  );
}
