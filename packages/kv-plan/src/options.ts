import { KV_CACHE_LAYOUTS, type KvCacheLayout } from "@kv/interface";
import { each, listOf, packageVersion, refuseValue, wholeNumberFrom } from "@kv/program";
import { Command, Option } from "commander";
import { type EngineFlags, layoutOf } from "./input/engine-flags.js";
import { MAX_RANKS } from "./input/pair.js";
import { addReportOptions, integer, type ReportOptions } from "./report-options.js";

/**
 * The flags of `kv-plan`. Where the two engines differ a flag has two values: prefill, then decode.
 */
export interface CliOptions extends ReportOptions, EngineFlags {
  readonly file?: string | undefined;
  readonly config: readonly string[];
  readonly kvHeads?: number | undefined;
  readonly headSize?: number | undefined;
  readonly layers?: number | undefined;
  readonly mla: boolean;
  readonly kvCacheDtype: string;
  readonly ssmDtype: string;
  readonly prefixCaching: boolean;
}

/** The command `kv-plan` with its options and without an action. */
export function command(): Command {
  const program = new Command("kv-plan")
    .version(packageVersion(import.meta.url))
    .helpCommand(true)
    .description(
      "Show how decode ranks read the KV cache of prefill ranks: which rank reads which heads from which rank, in how many descriptors, and a proof of the plan.\n" +
        "Where the engines differ a flag is given twice: first for prefill, then for decode.",
    )
    .optionsGroup("Model:")
    .option("--file <pair.json>", "read the pair from a file")
    .addOption(
      several(
        "--config <config.json>",
        "the model's config.json from Hugging Face; once or twice",
        each(String),
        "none",
      ),
    )
    .option("--kv-heads <count>", "KV heads of the model, without a config", integer)
    .option("--head-size <elements>", "elements of a head, without a config", integer)
    .option("--layers <count>", "layers with a cache, without a config", integer)
    .option(
      "--mla",
      "the model has multi-head latent attention: --head-size is its latent vector",
      false,
    )
    .optionsGroup("Engines:")
    .addOption(several("--tp <size>", "tensor parallel size; once or twice", sizes, "1"))
    .addOption(several("--pp <stages>", "pipeline stages of prefill; decode has one", sizes, "1"))
    .addOption(
      several("--block-size <tokens>", "tokens in a block; once or twice", integers, "vLLM's"),
    )
    .addOption(
      several("--kernel-block-size <tokens>", "tokens in a kernel block", integers, "vLLM's"),
    )
    .addOption(
      several(
        "--layout <name>",
        `HND, NHD or one of ${KV_CACHE_LAYOUTS.join(", ")}`,
        lists(layout),
        "vLLM's",
      ),
    )
    .addOption(several("--backend <name>", "attention backend", lists(String), "vLLM's"))
    .addOption(several("--num-blocks <count>", "blocks of a rank", integers, "10000"))
    .option(
      "--kv-cache-dtype <name>",
      "auto, bfloat16, float16, float32, fp8, nvfp4, fp8_per_token_head, …",
      "auto",
    )
    .option(
      "--ssm-dtype <name>",
      "of a hybrid's recurrent states: auto (the config's, else float32), or as above",
      "auto",
    )
    .option(
      "--no-prefix-caching",
      "the engines keep no prefixes; a hybrid's blocks then have other sizes",
    )
    .allowExcessArguments(false);
  return addReportOptions(program);
}

/** An option that may be given more than once. `shown` is the default that the help names. */
function several<T>(
  flags: string,
  description: string,
  collected: (value: string, before: readonly T[]) => readonly T[],
  shown: string,
): Option {
  return new Option(flags, description).argParser<readonly T[]>(collected).default([], shown);
}

/** Each value may be a list itself, with commas between its parts. */
const lists =
  <T>(read: (text: string) => T) =>
  (text: string, before: readonly T[]) => [...before, ...listOf(read)(text)];

const sizes = lists(wholeNumberFrom(1, MAX_RANKS));
const integers = lists(integer);

function layout(name: string): KvCacheLayout {
  return (
    layoutOf(name) ?? refuseValue(`It must be HND, NHD or one of ${KV_CACHE_LAYOUTS.join(", ")}.`)
  );
}
