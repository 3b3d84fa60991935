import { KV_CACHE_LAYOUTS, type KvCacheLayout } from "@kv/interface";
import { each, listOf, packageVersion, refuseValue, wholeNumberFrom } from "@kv/program";
import { Command, Option } from "commander";
import { type EngineFlags, layoutOf } from "./input/engine-flags.js";
import { MAX_RANKS } from "./input/pair.js";
import { addReportOptions, integer, type ReportOptions } from "./report-options.js";

/** The flags of `kv-plan`. Two values are prefill's and decode's. */
export interface CliOptions extends ReportOptions, EngineFlags {
  readonly file?: string | undefined;
  readonly config: readonly string[];
  readonly draft?: string | undefined;
  readonly draftTokens: number;
  readonly kvHeads?: number | undefined;
  readonly headSize?: number | undefined;
  readonly layers?: number | undefined;
  readonly mla: boolean;
  readonly kvCacheDtype: string;
  readonly ssmDtype: string;
  readonly prefixCaching: boolean;
}

/** Returns the command without an action. */
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
    .option(
      "--draft <config.json>",
      "what guesses tokens beside the model: an EAGLE head's config.json, or mtp for the checkpoint's own layers",
    )
    .option("--draft-tokens <count>", "vLLM's num_speculative_tokens", integer, 1)
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
    .addOption(several("--num-blocks <count>", "blocks of a rank", integers, "10000"));
  return addReportOptions(cacheOptions(program).allowExcessArguments(false));
}

/** Adds the flags that decide the types and blocks of a config's caches. */
export function cacheOptions(program: Command): Command {
  return program
    .option(
      "--kv-cache-dtype <name>",
      "auto, bfloat16, float16, fp8, nvfp4, fp8_per_token_head, …",
      "auto",
    )
    .option(
      "--ssm-dtype <name>",
      "of a hybrid's recurrent states: auto (the config's, else float32), float32, bfloat16 or float16",
      "auto",
    )
    .option(
      "--no-prefix-caching",
      "the engines keep no prefixes; a hybrid's blocks then have other sizes",
    );
}

/** An option that may repeat. `shown`: the default in the help. */
function several<T>(
  flags: string,
  description: string,
  collected: (value: string, before: readonly T[]) => readonly T[],
  shown: string,
): Option {
  return new Option(flags, description).argParser<readonly T[]>(collected).default([], shown);
}

/** Each value may itself be a list with commas. */
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
