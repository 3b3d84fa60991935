import { KvError } from "@kv/interface";
import type { ModelCaches } from "../model/model-caches.js";
import { both, type EngineFlags } from "./engine-flags.js";
import type { ModelSource } from "./model-source.js";
import { MAX_RANKS } from "./pair.js";

export interface Engine {
  readonly caches: ModelCaches;
  readonly tpSize: number;
  readonly ppSize: number;
  /** Tokens; a divisor of the caches' `blockSize`. */
  readonly kernelBlockSize: number;
  readonly attentionBackend: string;
  /** Logical blocks of a rank. */
  readonly numBlocks: number;
}

/**
 * Adds defaults that apply to `assumed`.
 * @throws `KV_CONFIG_INVALID`; those of `ModelSource.caches`.
 */
export function enginesOf(
  options: EngineFlags,
  assumed: string[],
  models: readonly [ModelSource, ModelSource],
): readonly [Engine, Engine] {
  const say = <T>(
    flag: string,
    values: readonly T[],
    fallback: readonly [T, T],
  ): readonly [T, T] => {
    if (values.length > 0) return both(flag, values, fallback[0]);
    assumed.push(`${flag} ${String(fallback[0] === fallback[1] ? fallback[0] : fallback)}`);
    return fallback;
  };
  const tp = say("--tp", options.tp, [1, 1]);
  const pp = stagesOf(options);
  for (const [side, tpSize] of tp.entries()) {
    const ppSize = pp[side] as number;
    if (tpSize * ppSize > MAX_RANKS)
      throw new KvError(
        "KV_CONFIG_INVALID",
        `--tp ${tpSize} and --pp ${ppSize} make ${tpSize * ppSize} ranks, more than ${MAX_RANKS}`,
      );
  }
  const asked = options.blockSize.length === 0 ? [] : both("--block-size", options.blockSize, 16);
  const layout = options.layout.length === 0 ? [] : both("--layout", options.layout, "LBHNC");
  const caches = tp.map((tpSize, side) =>
    models[side]?.caches({ tpSize, blockSize: asked[side], layout: layout[side] }),
  ) as [ModelCaches, ModelCaches];
  const of = <T>(fact: (caches: ModelCaches) => T): readonly [T, T] => [
    fact(caches[0]),
    fact(caches[1]),
  ];
  const blockSizes = of(({ blockSize }) => blockSize);
  const hasStates = caches[0].stateBlockSize !== undefined;
  if (asked.length === 0)
    assumed.push(
      `--block-size ${blockSizes[0] === blockSizes[1] ? blockSizes[0] : blockSizes}${hasStates ? ": the fewest tokens whose page holds a state" : ""}`,
    );
  else if (asked.some((size, side) => size !== blockSizes[side]))
    assumed.push(
      `--block-size ${blockSizes} instead of ${asked}: vLLM raises it until a page holds a state`,
    );
  const kernel = kernelSizes(options, assumed, caches);
  say(
    "--layout",
    options.layout,
    of((each) => each.layout),
  );
  const backends = say(
    "--backend",
    options.backend,
    of(({ backend }) => backend),
  );
  const numBlocks = say("--num-blocks", options.numBlocks, [10_000, 10_000]);
  return [0, 1].map((side): Engine => {
    const [size, inner] = [blockSizes[side] as number, kernel[side] as number];
    if (size % inner !== 0)
      throw new KvError(
        "KV_CONFIG_INVALID",
        `--block-size ${size} is not a multiple of --kernel-block-size ${inner}`,
      );
    return {
      caches: caches[side] as ModelCaches,
      tpSize: tp[side] as number,
      ppSize: pp[side] as number,
      kernelBlockSize: inner,
      attentionBackend: backends[side] as string,
      numBlocks: numBlocks[side] as number,
    };
  }) as [Engine, Engine];
}

/** A single value is prefill's, because only producers have stages. */
function stagesOf({ pp }: EngineFlags): readonly [number, number] {
  return both("--pp", pp.length === 1 ? [...pp, 1] : pp, 1);
}

function kernelSizes(
  { kernelBlockSize }: EngineFlags,
  assumed: string[],
  caches: readonly [ModelCaches, ModelCaches],
): readonly [number, number] {
  if (kernelBlockSize.length > 0) return both("--kernel-block-size", kernelBlockSize, 16);
  const sizes = caches.map((each) => each.kernelBlockSize);
  const isWhole = caches.every((each) => each.kernelBlockSize === each.blockSize);
  assumed.push(
    isWhole
      ? "kernel blocks as large as blocks (--kernel-block-size)"
      : `--kernel-block-size ${[...new Set(sizes)]}`,
  );
  return sizes as [number, number];
}
