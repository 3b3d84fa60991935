import { KvError } from "@kv/interface";
import type { CliOptions } from "../options.js";

/** The flags that define a pair. */
export type PairInput = "--file" | "--config" | "--layers";

const MODELS: readonly PairInput[] = ["--config", "--layers"];

/** The inputs with which each flag has an effect. */
const SERVES_WITH: readonly (readonly [
  flag: string,
  option: keyof CliOptions,
  inputs: readonly PairInput[],
])[] = [
  ["--tp", "tp", MODELS],
  ["--pp", "pp", MODELS],
  ["--block-size", "blockSize", MODELS],
  ["--kernel-block-size", "kernelBlockSize", MODELS],
  ["--layout", "layout", MODELS],
  ["--backend", "backend", MODELS],
  ["--num-blocks", "numBlocks", MODELS],
  ["--kv-cache-dtype", "kvCacheDtype", MODELS],
  ["--ssm-dtype", "ssmDtype", ["--config"]],
  ["--no-prefix-caching", "prefixCaching", ["--config"]],
  ["--kv-heads", "kvHeads", ["--layers"]],
  ["--head-size", "headSize", ["--layers"]],
  ["--mla", "mla", ["--layers"]],
];

/** Whether the value of an option is not its default. */
function isGiven(option: keyof CliOptions, value: CliOptions[keyof CliOptions]): boolean {
  // vLLM's default is on, and the flag takes it away.
  if (option === "prefixCaching") return value === false;
  return Array.isArray(value) ? value.length > 0 : value !== undefined && value !== false && value !== "auto";
}

/** Refuses flags that have no effect with an input. Errors: `KV_CONFIG_INVALID` with the flags. */
export function refuseUnused(options: CliOptions, input: PairInput): void {
  const unused = SERVES_WITH.filter(
    ([, option, inputs]) => isGiven(option, options[option]) && !inputs.includes(input),
  );
  if (unused.length > 0) {
    const serving = [...new Set(unused.flatMap(([, , inputs]) => inputs))];
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${unused.map(([flag]) => flag).join(", ")} has no effect with ${input}`,
      {
        hint: `${input} defines it already, or does not use it: leave the flag out, or give the pair with ${serving.join(" or ")}`,
      },
    );
  }
  if (input === "--layers" && options.mla && options.kvHeads !== undefined) {
    throw new KvError("KV_CONFIG_INVALID", "--kv-heads has no effect with --mla", {
      hint: "a latent vector has no heads: leave one of the two out",
    });
  }
}
