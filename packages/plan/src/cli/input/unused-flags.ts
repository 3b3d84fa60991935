import { KvError } from "@kv/interface";
import type { CliOptions } from "../options.js";

/** The flags that define a pair. */
export type PairInput = "--file" | "--config" | "--layers";

interface FlagUse {
  readonly flag: string;
  readonly isGiven: (options: CliOptions) => boolean;
  /** The inputs with which the flag has an effect. */
  readonly servesWith: readonly PairInput[];
}

const MODELS: readonly PairInput[] = ["--config", "--layers"];

const USES: readonly FlagUse[] = [
  { flag: "--tp", isGiven: ({ tp }) => tp.length > 0, servesWith: MODELS },
  { flag: "--pp", isGiven: ({ pp }) => pp.length > 0, servesWith: MODELS },
  { flag: "--block-size", isGiven: ({ blockSize }) => blockSize.length > 0, servesWith: MODELS },
  {
    flag: "--kernel-block-size",
    isGiven: ({ kernelBlockSize }) => kernelBlockSize.length > 0,
    servesWith: MODELS,
  },
  { flag: "--layout", isGiven: ({ layout }) => layout.length > 0, servesWith: MODELS },
  { flag: "--backend", isGiven: ({ backend }) => backend.length > 0, servesWith: MODELS },
  { flag: "--num-blocks", isGiven: ({ numBlocks }) => numBlocks.length > 0, servesWith: MODELS },
  { flag: "--kv-cache-dtype", isGiven: ({ kvCacheDtype }) => kvCacheDtype !== "auto", servesWith: MODELS },
  { flag: "--ssm-dtype", isGiven: ({ ssmDtype }) => ssmDtype !== "auto", servesWith: ["--config"] },
  { flag: "--kv-heads", isGiven: ({ kvHeads }) => kvHeads !== undefined, servesWith: ["--layers"] },
  { flag: "--head-size", isGiven: ({ headSize }) => headSize !== undefined, servesWith: ["--layers"] },
  { flag: "--mla", isGiven: ({ mla }) => mla, servesWith: ["--layers"] },
];

/** Refuses flags that have no effect with an input. Errors: `KV_CONFIG_INVALID` with the flags. */
export function refuseUnused(options: CliOptions, input: PairInput): void {
  const unused = USES.filter(({ isGiven, servesWith }) => isGiven(options) && !servesWith.includes(input));
  if (unused.length > 0) {
    const serving = [...new Set(unused.flatMap(({ servesWith }) => servesWith))];
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${unused.map(({ flag }) => flag).join(", ")} has no effect with ${input}`,
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
