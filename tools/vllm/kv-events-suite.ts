import { type Instance, KvEventSubscriber } from "@kv/fleet";
import { parseGenerationRequest } from "@kv/fleet/front-end";
import { silentLog, systemClock } from "@kv/interface";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { KV_REQUEST_PULL, prefillBody } from "../../packages/proxy/src/request/leg-bodies.js";
import { BOUNDARY_CASES, words } from "./boundary-cases.js";
import { ask, ONE_USE } from "./completion.js";
import type { ProxyPair } from "./proxy-pair.js";
import type { VllmServer } from "./server.js";
import { until } from "./until.js";

/** The sockets take free ports. vLLM serves `/render` only with `--enable-scale-out`. */
export const KV_EVENTS_ARGUMENTS = [
  "--enable-scale-out",
  "--kv-events-config",
  JSON.stringify({
    enable_kv_cache_events: true,
    publisher: "zmq",
    endpoint: "tcp://*:0",
    replay_endpoint: "tcp://*:0",
  }),
];

const CHAT = "/v1/chat/completions";
const BLOCK_TOKENS = 32;
const [CONVERSATIONS, TURNS] = [25, 20];
const GAP_BATCHES = 100;

interface Message {
  readonly role: string;
  readonly content: string;
}

/** More than the cache holds. */
function* chats(): Generator<readonly Message[]> {
  for (let turn = 1; turn <= TURNS; turn += 1)
    for (let conversation = 0; conversation < CONVERSATIONS; conversation += 1) {
      const system = { role: "system", content: words(70, 5000 + (conversation % 3)) };
      const turns = Array.from({ length: turn }, (_, at) => ({
        role: at % 2 === 0 ? "user" : "assistant",
        content: words(17 + (conversation % 7), 100 * conversation + at),
      }));
      yield [system, ...turns];
    }
}

/** Exact prompts by `/render`, and prefixes of chats against blocks from KV events. */
export function kvEventsSuite(pair: ProxyPair): void {
  test.each(BOUNDARY_CASES)(
    "$name ($path): P's leg has the prompt of the client's request, token by token",
    async ({ path, body }) => {
      const promptOf = async (sent: string) => {
        const answer = await ask(`${pair.p.url}${path}/render`, JSON.parse(sent));
        const rendered = [(await answer.json()) as { token_ids: number[] }].flat();
        return [answer.status, rendered.map(({ token_ids: ids }) => ids)];
      };
      const text = JSON.stringify(body);
      const leg = prefillBody(
        parseGenerationRequest(path, Buffer.from(text)),
        KV_REQUEST_PULL,
        "id",
      );
      const right = await promptOf(text);
      expect(right).toEqual([
        200,
        expect.arrayContaining([expect.arrayContaining([expect.any(Number)])]),
      ]);
      expect(await promptOf(String(leg))).toEqual(right);
    },
  );

  test("of 500 chat requests, the expected hit is within one block of cached_tokens for 99 %", async () => {
    const { log, logged } = recordedLog();
    const { url, proxy } = await pair.proxied({
      routing: { prefill: "prefix-aware", decode: "prefix-aware" },
      log,
    });
    const events = () => proxy.status().prefillers[0]?.kv_events;
    await until(() => events()?.state === "following", "the proxy follows P's events");
    for (const messages of chats()) {
      const answer = await ask(url + CHAT, {
        model: "tiny",
        messages,
        max_tokens: 2,
        temperature: 0,
      });
      expect(answer.status).toBe(200);
      await answer.text();
    }
    const records = logged("request-done");
    expect(records).toHaveLength(CONVERSATIONS * TURNS);
    const hits = records.map(({ expectedCachedTokens: expected, cachedTokens: cached }) => ({
      expected: Number(expected),
      cached: Number(cached),
    }));
    const near = hits.filter(
      ({ expected, cached }) => Math.abs(expected - cached) <= BLOCK_TOKENS,
    ).length;
    const equal = hits.filter(({ expected, cached }) => expected === cached).length;
    const sum = (what: "expected" | "cached") => hits.reduce((all, hit) => all + hit[what], 0);
    const evicted = await pair.p.metric("vllm:prefix_cache_queries_total");
    process.stdout.write(
      `chats: ${hits.length}, within a block ${near}, equal ${equal}, expected ${sum("expected")} and cached ${sum("cached")} of ${evicted} tokens\n`,
    );
    expect(near).toBeGreaterThanOrEqual(0.99 * hits.length);
    // The hits were expected by events: no text was remembered instead.
    expect(sum("cached")).toBeGreaterThan(10 * hits.length);
    expect(events()).toMatchObject({ complete: true, missed_batches: 0 });
  });

  test("a router that starts late, and one with a gap of 100 batches, have the index of one without", async () => {
    const source = await sourceOf(pair.p);
    const relay = await pair.tap({}, source.endpoint.replace("tcp:", "http:"));
    const following = (endpoint: string) => {
      const subscriber = new KvEventSubscriber({ log: silentLog, clock: systemClock() });
      pair.closing({ close: async () => subscriber.close() });
      const instance = { role: "prefill", url: pair.p.url, inFlight: 0 } as const;
      const followed: Instance = {
        ...instance,
        kvEvents: endpoint,
        kvEventsReplay: source.replayEndpoint,
      };
      subscriber.follow([followed]);
      return {
        status: () => subscriber.status(followed),
        matched: (tokens: readonly number[]) => subscriber.matchedTokens(followed, tokens),
      };
    };
    const [direct, gapped] = [
      following(source.endpoint),
      following(relay.url.replace("http:", "tcp:")),
    ];
    for (const one of [direct, gapped])
      await until(() => one.status()?.state === "following", "both follow P's events");
    relay.cut();
    const before = direct.status()?.next_batch ?? 0;
    const missed = () => (direct.status()?.next_batch ?? 0) - before;
    const prompts: Message[][] = [];
    for (let seed = 9000; missed() < GAP_BATCHES; seed += 1) {
      const messages = [{ role: "user", content: words(40 + (seed % 60), seed) }];
      prompts.push(messages);
      await (await ask(pair.p.url + CHAT, { model: "tiny", messages, max_tokens: 1 })).text();
    }
    expect(gapped.status()?.next_batch).toBe(before);
    relay.mend();
    const late = following(source.endpoint);
    const next = () => direct.status()?.next_batch;
    for (const one of [gapped, late])
      await until(() => one.status()?.next_batch === next(), "the missed batches were replayed");
    const rendered = await Promise.all(prompts.map((messages) => render(pair.p, messages)));
    const matched = (one: typeof direct) => rendered.map((tokens) => one.matched(tokens));
    expect(matched(direct).some((tokens) => (tokens ?? 0) > 0)).toBe(true);
    for (const one of [gapped, late]) {
      expect(one.status()).toMatchObject({ complete: true, blocks: direct.status()?.blocks });
      expect(matched(one)).toEqual(matched(direct));
    }
  });
}

async function sourceOf({ url }: VllmServer) {
  const sources = (await (
    await fetch(`${url}/kv_event_sources`, { headers: ONE_USE })
  ).json()) as Record<string, { readonly endpoint: string; readonly replay_endpoint: string }>;
  const [first] = Object.values(sources);
  if (first === undefined) throw new Error(`${url} publishes no KV events`);
  return { endpoint: first.endpoint, replayEndpoint: first.replay_endpoint };
}

async function render(
  { url }: VllmServer,
  messages: readonly Message[],
): Promise<readonly number[]> {
  const answer = await ask(`${url}${CHAT}/render`, { model: "tiny", messages });
  return ((await answer.json()) as { readonly token_ids: readonly number[] }).token_ids;
}
