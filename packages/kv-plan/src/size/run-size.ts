import { commanderOutput, EXIT_CODES, positiveNumber, share, size } from "@kv/program";
import { Command } from "commander";
import { modelOfConfig } from "../input/model-source.js";
import { nameOf, readJson } from "../input/read-pair.js";
import { cacheOptions } from "../options.js";
import { integer } from "../report-options.js";
import { renderSize } from "./render-size.js";
import { SIZE_DEFAULTS, type SizeSettings, sizeReport } from "./size-report.js";

interface SizeOptions {
  readonly config: string;
  readonly tp: number;
  readonly dp: number;
  readonly memory: number;
  readonly gpuMemoryUtilization: number;
  readonly weights?: number | undefined;
  readonly other: number;
  readonly tokens: number;
  readonly maxNumBatchedTokens?: number | undefined;
  readonly bandwidth: number;
  readonly blockSize?: number | undefined;
  readonly kvCacheDtype: string;
  readonly ssmDtype: string;
  readonly prefixCaching: boolean;
  readonly json: boolean;
}

/**
 * `kv-plan size`. `args` exclude node, the script and `size`. Returns one of `EXIT_CODES`.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`, and what commander throws for wrong flags.
 */
export async function runSize(
  args: readonly string[],
  output: Record<"stdout" | "stderr", (text: string) => void>,
): Promise<number> {
  const program = sizeCommand()
    .exitOverride()
    .configureOutput({
      ...commanderOutput("kv-plan size"),
      writeOut: (text) => output.stdout(text),
      writeErr: (text) => output.stderr(text),
    });
  program.parse(args, { from: "user" });
  const options = program.opts<SizeOptions>();
  const config = await readJson(options.config);
  const model = modelOfConfig(nameOf(options.config), config, {
    cacheDtype: options.kvCacheDtype,
    stateDtype: options.ssmDtype,
    prefixCaching: options.prefixCaching,
  });
  const report = sizeReport(model, config, settingsOf(options), {
    blockSize: options.blockSize === undefined ? [] : [options.blockSize],
    layout: [],
  });
  output.stdout(options.json ? `${JSON.stringify(report, null, 2)}\n` : renderSize(report));
  return EXIT_CODES.ok;
}

function settingsOf(options: SizeOptions): SizeSettings {
  return {
    tpSize: options.tp,
    dpSize: options.dp,
    memoryBytes: options.memory,
    utilization: options.gpuMemoryUtilization,
    weightsBytes: options.weights,
    otherBytes: options.other,
    requestTokens: options.tokens,
    batchedTokens: options.maxNumBatchedTokens,
    bandwidthGBps: options.bandwidth,
  };
}

function sizeCommand(): Command {
  const program = new Command("size")
    .description("Show how many tokens and requests fit into a GPU, and what a hand-over costs.")
    .requiredOption("--config <config.json>", "the model's config.json from Hugging Face")
    .option("--tp <size>", "tensor parallel size", integer, 1)
    .option("--dp <ranks>", "data parallel replicas, each with its own cache", integer, 1)
    .option("--memory <bytes>", "of one GPU, such as 80GiB", size, 80 * 2 ** 30)
    .option("--gpu-memory-utilization <share>", "vLLM's flag", share, SIZE_DEFAULTS.utilization)
    .option(
      "--weights <bytes>",
      "of the whole checkpoint, such as 140GiB (default: estimated)",
      size,
    )
    .option(
      "--other <bytes>",
      "activations, CUDA graphs and libraries of one GPU, which vLLM measures",
      size,
      SIZE_DEFAULTS.otherBytes,
    )
    .option("--tokens <count>", "tokens of a request, prompt and output", integer, 8192)
    .option(
      "--max-num-batched-tokens <count>",
      "vLLM's flag (default: vLLM's for the GPU)",
      integer,
    )
    .option("--bandwidth <GB/s>", "of one GPU's link", positiveNumber, 25)
    .option("--block-size <tokens>", "tokens in a block (default: vLLM's)", integer);
  return cacheOptions(program).option("--json", "print JSON", false).allowExcessArguments(false);
}
