import { KvError } from "@kv/interface";
import { type CacheSpec, leastCommonMultiple, unpaddedPageBytes } from "./cache-spec.js";
import type { LayerCache } from "./kv-cache-groups.js";
import type { Backend, ModelContext, ModelDraft } from "./model-draft.js";

/** vLLM's `DEFAULT_BLOCK_SIZE`. */
const DEFAULT_BLOCK_TOKENS = 16;

export interface BlockSizes {
  /** vLLM's `block_size`. */
  readonly blockSize: number;
  /** vLLM's `mamba_block_size`, for models with states. */
  readonly stateBlockSize?: number;
  /** Bytes to which a state's page is padded. */
  readonly statePageBytes?: number;
}

/**
 * As vLLM 0.33 derives them (`Platform.update_block_size_for_backend`): the given size, or 16, or
 * the least that all backends take; for a hybrid, the fewest tokens whose attention page holds a
 * state. `maxTokens`: vLLM's `max_model_len`, the block size of states without prefix caching.
 * @throws `KV_CONFIG_INVALID` for a block size that a kernel does not take.
 */
export function blockSizesOf(
  context: Pick<ModelContext, "name" | "prefixCaching">,
  draft: ModelDraft,
  asked: number | undefined,
  maxTokens: number,
): BlockSizes {
  const preferred = asked ?? draft.blockSize ?? commonBlockSize(draft.backends);
  for (const { name, kernelTokens } of draft.backends)
    if (preferred % kernelTokens !== 0)
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${context.name}: ${name} takes blocks of multiples of ${kernelTokens} tokens, and --block-size is ${preferred}`,
      );
  const states = draft.layers.flatMap(({ spec }) =>
    "mambaType" in spec ? [{ ...spec, blockSize: 1 }] : [],
  );
  const [state] = states;
  if (state === undefined) return { blockSize: preferred };
  // vLLM caches no prefixes for a model without attention.
  const align = context.prefixCaching && draft.backends.length > 0;
  const blockSize =
    draft.tokenBytes === 0
      ? preferred
      : hybridBlockSize(draft, preferred, unpaddedPageBytes(state), align);
  const statePageBytes = blockSize * (draft.tokenBytes ?? 0);
  return {
    blockSize,
    stateBlockSize: align ? blockSize : maxTokens,
    ...(statePageBytes > unpaddedPageBytes(state) ? { statePageBytes } : {}),
  };
}

/** Returns 16, or the least that all backends take. */
function commonBlockSize(backends: readonly Backend[]): number {
  const takes = (tokens: number) =>
    backends.every(({ kernelTokens, only = false }) =>
      only ? tokens === kernelTokens : tokens % kernelTokens === 0,
    );
  if (takes(DEFAULT_BLOCK_TOKENS)) return DEFAULT_BLOCK_TOKENS;
  return backends.map(({ kernelTokens }) => kernelTokens).reduce(leastCommonMultiple, 1);
}

/**
 * The fewest tokens whose attention page holds a state, rounded up for kernels and state
 * checkpoints.
 */
function hybridBlockSize(
  draft: ModelDraft,
  preferred: number,
  state: number,
  align: boolean,
): number {
  const { backends, tokenBytes = 0, leastBlockTokens = 1, stateAlignment = 1 } = draft;
  const kernels = backends.map(({ kernelTokens }) => kernelTokens);
  const least = Math.max(...kernels.slice(0, 1), preferred, leastBlockTokens);
  const unit = align ? leastCommonMultiple(least, stateAlignment) : least;
  const kernel = kernels.reduce(leastCommonMultiple, 1);
  const tokens = unit * Math.ceil(state / (unit * tokenBytes));
  return Math.max(preferred, kernel * Math.ceil(tokens / kernel));
}

export function layersOf(draft: ModelDraft, sizes: BlockSizes): readonly LayerCache[] {
  return draft.layers.map(({ name, layer, spec, blockSize }) => {
    const isState = "mambaType" in spec;
    const tokens = blockSize ?? (isState ? sizes.stateBlockSize : undefined) ?? sizes.blockSize;
    const padded =
      isState && sizes.statePageBytes !== undefined ? { pageSizePadded: sizes.statePageBytes } : {};
    return { name, layer, spec: { ...spec, blockSize: tokens, ...padded } as CacheSpec };
  });
}
