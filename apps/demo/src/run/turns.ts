import { METRICS } from "@kv/connector";
import type { Cluster } from "../cluster/cluster.js";
import { loadModel } from "../model/model.js";
import { sameTokens } from "./check-run.js";
import { complete } from "./completion-client.js";
import { type ExpectedPrompts, referenceTokens, syntheticPrompts } from "./prepare-run.js";

/** A conversation: each turn's prompt is the last one, its output, and a little more. */
export type Conversation = ExpectedPrompts;

/** One turn, as `--json` prints it, with where the KV of its prompt came from. */
export interface Turn {
  readonly prompt_tokens: number;
  readonly cached_tokens: number;
  readonly read_back_tokens: number;
  readonly computed_tokens: number;
  readonly output_tokens: number;
  readonly tokens_equal: boolean;
}

/**
 * Settings of `kv_connector_extra_config` that both sides need. The built-in model is small: it is
 * read back however little there is.
 */
export const READBACK = {
  bidirectional_kv_xfer: true,
  kv_recompute_threshold: 0,
  decoder_kv_blocks_ttl: 60,
};

/** Tokens that the user adds in each turn. */
const NEW_TOKENS = 20;

/**
 * Computes the reference of a conversation of so many turns in this process. The model is closed
 * before the servers load theirs.
 */
export async function prepareConversation(
  turns: number,
  options: { readonly model?: string | undefined; readonly tinyKvHeads?: number | undefined },
  { maxTokens, say }: { readonly maxTokens: number; readonly say: (line: string) => void },
): Promise<Conversation> {
  const { model: directory, tinyKvHeads } = options;
  const model = await loadModel({ onProgress: say, directory, tinyKvHeads });
  try {
    const { vocabSize } = model.config;
    const [first = [], ...rest] = syntheticPrompts({ count: turns, vocabSize, maxTokens: 100 });
    const prompts: number[][] = [];
    const expected: number[][] = [];
    for (const added of [first, ...rest.map((prompt) => prompt.slice(0, NEW_TOKENS))]) {
      const prompt = [...(prompts.at(-1) ?? []), ...(expected.at(-1) ?? []), ...added];
      const [output = []] = await referenceTokens([prompt], { model, maxTokens });
      prompts.push(prompt);
      expected.push(output);
    }
    return { prompts, expected };
  } finally {
    await model.close();
  }
}

/**
 * Plays a conversation through the front of a cluster, which knows nothing of it but its prompts.
 * @throws `KV_PROXY_UPSTREAM_FAILED` with the answer of the front.
 */
export async function playConversation(
  { proxy, prefills }: Pick<Cluster, "proxy" | "prefills">,
  { prompts, expected }: Conversation,
): Promise<readonly Turn[]> {
  const turns: Turn[] = [];
  const allPromptTokens = () => Promise.all(prefills.map(({ url }) => promptTokensBySource(url)));
  for (const [index, promptTokens] of prompts.entries()) {
    const wanted = expected[index] ?? [];
    const before = await allPromptTokens();
    const requestId = `turn-${index + 1}`;
    const { tokens } = await complete({
      url: proxy.url,
      requestId,
      promptTokens,
      maxTokens: wanted.length,
    });
    const after = await allPromptTokens();
    const sum = (counts: typeof after, source: string) =>
      counts.reduce((all, one) => all + (one.get(source) ?? 0), 0);
    const of = (source: string) => sum(after, source) - sum(before, source);
    turns.push({
      prompt_tokens: promptTokens.length,
      cached_tokens: of("local_cache_hit"),
      read_back_tokens: of("external_kv_transfer"),
      computed_tokens: of("local_compute"),
      output_tokens: tokens.length,
      tokens_equal: sameTokens(tokens, wanted),
    });
  }
  return turns;
}

/**
 * Tokens of prompts that an instance has computed, found in its prefix cache, or got from a peer,
 * by vLLM's names of these sources.
 */
async function promptTokensBySource(url: string): Promise<ReadonlyMap<string, number>> {
  const text = await (await fetch(`${url}/metrics`)).text();
  const sample = new RegExp(
    `^${METRICS.promptTokensBySource}_total\\{[^}]*source="(\\w+)"[^}]*\\} (\\d+)`,
    "gm",
  );
  return new Map(
    [...text.matchAll(sample)].map(([, source = "", count]) => [source, Number(count)]),
  );
}

export function turnsJson(turns: readonly Turn[]): object {
  return { ok: areEqual(turns), turns };
}

export function turnsTable(turns: readonly Turn[]): string {
  const header = [
    "turn",
    "prompt tokens",
    "cached at P",
    "read back from D",
    "computed by P",
    "output",
    "tokens",
  ];
  const rows = turns.map((turn, index) =>
    [
      index + 1,
      turn.prompt_tokens,
      turn.cached_tokens,
      turn.read_back_tokens,
      turn.computed_tokens,
      turn.output_tokens,
      turn.tokens_equal ? "equal" : "DIFFERENT",
    ].map(String),
  );
  const line = (cells: readonly string[]) =>
    cells.map((cell, at) => cell.padStart(header[at]?.length ?? 0)).join("  ");
  const verdict = areEqual(turns)
    ? `all ${turns.length} turns have the tokens of a run in one process`
    : "NOT all turns have the tokens of a run in one process";
  return [line(header), ...rows.map(line), "", verdict, ""].join("\n");
}

export function areEqual(turns: readonly Turn[]): boolean {
  return turns.every(({ tokens_equal }) => tokens_equal);
}
