import { METRICS } from "@kv/connector";
import type { Cluster } from "../cluster/cluster.js";
import { loadModel } from "../model/model.js";
import { sameTokens } from "./check-run.js";
import { complete } from "./completion-client.js";
import { type ExpectedPrompts, referenceTokens, syntheticPrompts } from "./prepare-run.js";
import { columns, equality } from "./report.js";

/** A conversation: each turn's prompt is the last one, its output, and a little more. */
export type Conversation = ExpectedPrompts;

export interface Turn {
  readonly prompt_tokens: number;
  readonly cached_tokens: number;
  readonly read_back_tokens: number;
  readonly computed_tokens: number;
  readonly output_tokens: number;
  readonly tokens_equal: boolean;
}

/** Settings of `kv_connector_extra_config` that both sides need, for a small model. */
export const READBACK = {
  bidirectional_kv_xfer: true,
  kv_recompute_threshold: 0,
  decoder_kv_blocks_ttl: 60,
};

/** Tokens that the user adds in each turn. */
const NEW_TOKENS = 20;

/** The model is closed before the servers load theirs. */
export async function prepareConversation(
  turns: number,
  {
    model: directory,
    tinyKvHeads,
  }: { readonly model?: string | undefined; readonly tinyKvHeads?: number | undefined },
  { maxTokens, say }: { readonly maxTokens: number; readonly say: (line: string) => void },
): Promise<Conversation> {
  await using model = await loadModel({ onProgress: say, directory, tinyKvHeads });
  const { vocabSize } = model.config;
  const prompts: number[][] = [];
  const expected: number[][] = [];
  let said: number[] = [];
  for (const tokens of syntheticPrompts({ count: turns, vocabSize, maxTokens: 100 })) {
    const prompt = [...said, ...(said.length === 0 ? tokens : tokens.slice(0, NEW_TOKENS))];
    const [output = []] = await referenceTokens([prompt], { model, maxTokens });
    prompts.push(prompt);
    expected.push(output);
    said = [...prompt, ...output];
  }
  return { prompts, expected };
}

/**
 * The proxy knows nothing of the conversation but its prompts.
 * @throws `KV_PROXY_UPSTREAM_FAILED` with the proxy's answer.
 */
export async function playConversation(
  { proxy, prefills }: Pick<Cluster, "proxy" | "prefills">,
  { prompts, expected }: Conversation,
): Promise<readonly Turn[]> {
  const turns: Turn[] = [];
  for (const [index, promptTokens] of prompts.entries()) {
    const wanted = expected[index] ?? [];
    const before = await promptTokensBySource(prefills);
    const { tokens } = await complete({
      url: proxy.url,
      requestId: `turn-${index + 1}`,
      promptTokens,
      maxTokens: wanted.length,
    });
    const after = await promptTokensBySource(prefills);
    const of = (source: string) => (after.get(source) ?? 0) - (before.get(source) ?? 0);
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

/** Tokens of prompts by vLLM's names of their sources. */
async function promptTokensBySource(
  instances: Cluster["prefills"],
): Promise<ReadonlyMap<string, number>> {
  const sample = new RegExp(
    `^${METRICS.promptTokensBySource}_total\\{[^}]*source="(\\w+)"[^}]*\\} (\\d+)`,
    "gm",
  );
  const sums = new Map<string, number>();
  for (const { url } of instances) {
    const text = await (await fetch(`${url}/metrics`)).text();
    for (const [, source = "", count] of text.matchAll(sample))
      sums.set(source, (sums.get(source) ?? 0) + Number(count));
  }
  return sums;
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
  const rows = turns.map((turn, index) => [
    index + 1,
    turn.prompt_tokens,
    turn.cached_tokens,
    turn.read_back_tokens,
    turn.computed_tokens,
    turn.output_tokens,
    equality(turn.tokens_equal),
  ]);
  const verdict = areEqual(turns)
    ? `all ${turns.length} turns have the tokens of a run in one process`
    : "NOT all turns have the tokens of a run in one process";
  return [...columns([header, ...rows], "  "), "", verdict, ""].join("\n");
}

export function areEqual(turns: readonly Turn[]): boolean {
  return turns.every(({ tokens_equal }) => tokens_equal);
}
