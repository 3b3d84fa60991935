import {
  type BlockIds,
  type Clock,
  type KvCacheConfig,
  KvError,
  type Staging,
  type Tracer,
} from "@kv/interface";
import type { StagedRequest, StagingCopied } from "./staging-step.js";

/** Prefill: the running requests, and how many blocks of each have been copied into the pool. */
export interface Saves {
  openWith(config: KvCacheConfig): void;
  expect(order: StagedRequest): void;
  forget(requestId: string): void;
  /** Copies the blocks that were computed since the last call. Waits for all copies, then throws if any failed. */
  run(computed: Readonly<Record<string, number>> | undefined): Promise<void>;
  readonly size: number;
}

export interface SavesOptions {
  readonly clock: Clock;
  readonly tracer: Tracer | undefined;
  readonly onCopied?: (copied: StagingCopied) => void;
  staging(): Staging;
}

export function createSaves({ clock, tracer, onCopied, staging }: SavesOptions): Saves {
  const requests = new Map<string, { readonly order: StagedRequest; savedTokens: number }>();
  let blockSize = 1;

  return {
    openWith(config) {
      blockSize = config.blockSize;
    },
    expect: (order) => void requests.set(order.requestId, { order, savedTokens: 0 }),
    forget: (requestId) => void requests.delete(requestId),
    async run(computed) {
      const failures = new Map<string, KvError>();
      await Promise.all(
        [...requests.values()].map(async (request) => {
          const { order, savedTokens } = request;
          const { requestId, numTokens } = order;
          const tokens = Math.min(computed?.[requestId] ?? numTokens, numTokens);
          // A partial block is copied once it is full, or at the end of the prompt.
          const ready = tokens === numTokens ? numTokens : Math.floor(tokens / blockSize) * blockSize;
          const begun = computed?.[requestId] === undefined ? 0 : savedTokens;
          if (ready <= begun) return;
          const [from, to] = [Math.floor(begun / blockSize), Math.ceil(ready / blockSize)];
          const cut = (ids: BlockIds) => ids.map((group) => group.slice(from, to));
          const startedMs = clock.now();
          const wire = cut(order.wire);
          const span = tracer?.start("kv.stage_save", {
            parent: order.traceparent,
            attributes: { "kv.blocks": wire.flat().length },
          });
          try {
            await staging().save(requestId, { device: cut(order.device), wire });
            span?.end();
            request.savedTokens = ready;
            onCopied?.({ requestId, direction: "save", wire, durationMs: clock.now() - startedMs });
          } catch (error) {
            span?.end(error);
            failures.set(requestId, KvError.from(error, "KV_STAGING_FAILED", `saving request ${requestId}`));
          }
        }),
      );
      const [first] = failures.values();
      if (first === undefined) return;
      throw new KvError("KV_STAGING_FAILED", first.message, {
        cause: first,
        details: { requestIds: [...failures.keys()] },
      });
    },
    get size() {
      return requests.size;
    },
  };
}
