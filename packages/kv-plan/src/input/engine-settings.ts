import { KvError } from "@kv/interface";
import { both, type EngineFlags } from "./engine-flags.js";
import type { ModelShape } from "./model-shape.js";
import { type EngineSettings, MAX_RANKS } from "./pair.js";
import { hybridBlockTokens, KERNEL_TOKENS } from "./state-pages.js";

/** The settings of both engines from the flags. Defaults that apply are added to `assumed`. Errors: `KV_CONFIG_INVALID`. */
export function settingsOf(
  options: EngineFlags,
  assumed: string[],
  model: ModelShape,
): readonly [EngineSettings, EngineSettings] {
  const say = <T>(flag: string, values: readonly T[], fallback: T): readonly [T, T] => {
    if (values.length === 0) assumed.push(`${flag} ${String(fallback)}`);
    return both(flag, values, fallback);
  };
  const backend = model.layers.every((layer) => layer.kind === "mla" || layer.kind === "swa-mla")
    ? "FLASHMLA"
    : "FLASH_ATTN";
  const tp = say("--tp", options.tp, 1);
  const pp = stagesOf(options);
  const [blockSize, kernel] = blockSizes(options, assumed, model, tp, say);
  const layout = say("--layout", options.layout, "LBHNC");
  const backends = say("--backend", options.backend, backend);
  const numBlocks = say("--num-blocks", options.numBlocks, 10_000);
  return [0, 1].map((side): EngineSettings => {
    const [size, inner] = [blockSize[side] as number, kernel[side] as number];
    const [tpSize, ppSize] = [tp[side] as number, pp[side] as number];
    if (tpSize * ppSize > MAX_RANKS) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `--tp ${tpSize} and --pp ${ppSize} make ${tpSize * ppSize} ranks, more than ${MAX_RANKS}`,
      );
    }
    if (size % inner !== 0) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `--block-size ${size} is not a multiple of --kernel-block-size ${inner}`,
      );
    }
    return {
      tpSize,
      ppSize,
      blockSize: size,
      kernelBlockSize: inner,
      layout: layout[side] as EngineSettings["layout"],
      attentionBackend: backends[side] as string,
      numBlocks: numBlocks[side] as number,
      memoryType: "VRAM",
    };
  }) as [EngineSettings, EngineSettings];
}

/** Pipeline stages of both engines. A single value is prefill's: only producers have stages. */
function stagesOf({ pp }: EngineFlags): readonly [number, number] {
  return both("--pp", pp.length === 1 ? [...pp, 1] : pp, 1);
}

/** Tokens in a logical block and in a kernel block of both engines. The page of a hybrid's block holds a state. */
function blockSizes(
  options: EngineFlags,
  assumed: string[],
  model: ModelShape,
  tp: readonly [number, number],
  say: (flag: string, values: readonly number[], fallback: number) => readonly [number, number],
): readonly [readonly [number, number], readonly [number, number]] {
  const isHybrid = model.layers.some(({ state }) => state !== undefined);
  if (isHybrid && options.blockSize.length === 0) {
    const kernel = say("--kernel-block-size", options.kernelBlockSize, KERNEL_TOKENS);
    const sizes = tp.map(
      (tpSize, side) => hybridBlockTokens(model.layers, tpSize, kernel[side] as number) ?? KERNEL_TOKENS,
    );
    assumed.push(`--block-size ${sizes.join(",")}: the fewest kernel blocks whose page holds a state`);
    return [sizes as [number, number], kernel];
  }
  const blockSize = say("--block-size", options.blockSize, model.blockTokens ?? 16);
  if (options.kernelBlockSize.length > 0)
    return [blockSize, both("--kernel-block-size", options.kernelBlockSize, 16)];
  assumed.push("kernel blocks as large as blocks (--kernel-block-size)");
  return [blockSize, blockSize];
}
