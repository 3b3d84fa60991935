import { KeptObjects } from "@kv/fleet/front-end";
import { systemClock } from "@kv/interface";
import { startUpstream } from "@kv/testing/http/fake-upstream";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { expect, test, vi } from "vitest";
import { PrefillDecodeProxy } from "../../src/proxy.js";
import { answerObjectCall, objectsByCalls } from "../../src/readback/object-store.js";
import { ask, expected } from "./client.js";
import { TurnServers } from "./turn-servers.js";

type Fields = Record<string, unknown>;

/** What a client does next. Numbers choose among what there is then. */
interface Step {
  readonly user: number;
  readonly kind:
    | ("turn" | "branch" | "regenerate" | "edit" | "shorter" | "new" | "copies")
    | ("stop" | "tools" | "image" | "ids" | "text" | "read fails" | "restart" | "copied");
  readonly at: number;
  readonly stream: boolean;
  readonly tellsIds: boolean;
  /** It is sent together with the one after it. */
  readonly atOnce: boolean;
}

const KINDS: readonly Step["kind"][] = [
  ...([
    "turn",
    "turn",
    "turn",
    "turn",
    "turn",
    "branch",
    "branch",
    "regenerate",
    "edit",
    "shorter",
  ] as const),
  ...([
    "new",
    "copies",
    "stop",
    "tools",
    "image",
    "ids",
    "text",
    "read fails",
    "restart",
    "copied",
    "copied",
  ] as const),
];

const STEP: fc.Arbitrary<Step> = fc.record({
  user: fc.constantFrom(0, 0, 1, 2, 3),
  kind: fc.constantFrom(...KINDS),
  // Small, so that users ask the same.
  at: fc.nat(4),
  stream: fc.boolean(),
  tellsIds: fc.boolean(),
  atOnce: fc.boolean(),
});

const SYSTEM = "words that all users begin with, and that are more than sixty-four tokens long";
/** Two of them ask the same of the same model; the salts of two differ. */
const USERS: readonly Fields[] = [
  { model: "m" },
  { model: "m" },
  { model: "m", cache_salt: "s" },
  { model: "lora" },
];

interface Conversation {
  messages: Fields[];
  /** Of completions. */
  prompt: string;
}

/** The body of a step, and what its answer changes. */
function bodyOf(
  step: Step,
  conversation: Conversation,
): { path: string; body: Fields; answered: (text: string) => void } {
  const { kind, at, user, stream, tellsIds } = step;
  const common = {
    ...USERS[user],
    stream,
    max_tokens: 8 + (at % 30),
    ...(tellsIds ? { return_token_ids: true } : {}),
  };
  if (kind === "ids" || kind === "text") {
    const prompt =
      kind === "text"
        ? conversation.prompt
        : [...conversation.prompt].map((one) => one.codePointAt(0));
    return {
      path: "/v1/completions",
      body: { ...common, prompt },
      answered: (text) => {
        conversation.prompt += `${text}${at}.`;
      },
    };
  }
  const { messages } = conversation;
  const question = {
    role: "user",
    content: kind === "image" ? [{ type: "image_url", image_url: { url: "x" } }] : `q${at}`,
  };
  let asked = [...messages, question];
  const some = 1 + (at % messages.length);
  if (kind === "new") asked = [{ role: "system", content: SYSTEM }, question];
  if (kind === "regenerate" && messages.length > 2) asked = messages.slice(0, -1);
  if (kind === "shorter") asked = [...messages.slice(0, some), question];
  if (kind === "edit")
    asked = asked.map((message, index) =>
      index === some ? { ...message, content: `${String(message.content)}~` } : message,
    );
  const more: Fields = {};
  if (kind === "copies") Object.assign(more, { n: 2, seed: at });
  if (kind === "stop") more.stop = "abcdefghij"[at % 10];
  if (kind === "tools") more.tools = [{ type: "function", function: { name: `f${at % 2}` } }];
  return {
    path: "/v1/chat/completions",
    body: { ...common, ...more, messages: asked, ...(kind === "regenerate" ? { seed: at } : {}) },
    answered: (text) => {
      if (kind !== "branch")
        conversation.messages = [...asked, { role: "assistant", content: text }];
    },
  };
}

type Routers = "one" | "two workers" | "two routers";

/**
 * Proxies in front of the same servers: with one store, as workers have it, or each with its own.
 */
async function startRouters(routers: Routers, prefill: string, decode: string) {
  const settings = {
    prefillers: [prefill],
    decoders: [decode],
    readback: { cachePercent: 30 },
    pairing: { mode: "off" as const },
    health: { intervalMs: 0 },
  };
  const store = new KeptObjects({ clock: systemClock(), ttlMs: 60_000 });
  const plain = (value: unknown) =>
    value === undefined ? undefined : JSON.parse(JSON.stringify(value));
  const shared = {
    status: () => Promise.reject(new Error("not asked")),
    changeInstance: () => Promise.reject(new Error("not asked")),
    objects: objectsByCalls(async (call) => plain(answerObjectCall(store, plain(call)))),
  };
  const count = routers === "one" ? 1 : 2;
  const proxies = Array.from(
    { length: count },
    () => new PrefillDecodeProxy(settings, routers === "two workers" ? shared : undefined),
  );
  const urls = await Promise.all(
    proxies.map(async (proxy) => (await proxy.listen({ port: 0 })).url),
  );
  return { urls, close: () => Promise.all(proxies.map((proxy) => proxy.close())) };
}

async function run(steps: readonly Step[], routers: Routers): Promise<TurnServers> {
  const turns = new TurnServers();
  turns.cacheBlocks = 400;
  const [prefill, decode] = [await startUpstream(turns.prefill), await startUpstream(turns.decode)];
  const { urls, close } = await startRouters(routers, prefill.url, decode.url);
  const conversations = USERS.map(
    (): Conversation => ({ messages: [{ role: "system", content: SYSTEM }], prompt: SYSTEM }),
  );
  try {
    let together: Promise<void>[] = [];
    for (const [index, step] of steps.entries()) {
      const conversation = conversations[step.user];
      if (conversation === undefined) continue;
      if (step.kind === "restart") {
        await Promise.all(together);
        turns.restartDecoder();
      }
      if (step.kind === "read fails") turns.failures.push("500");
      // One user has what another one has been told.
      const other = conversations[(step.user + 2) % USERS.length];
      if (step.kind === "copied" && other !== undefined) conversation.messages = other.messages;
      const { path, body, answered } = bodyOf(step, conversation);
      if (step.kind === "branch") {
        const second = bodyOf({ ...step, at: step.at + 1 }, conversation);
        together.push(
          ask(urls[(index + 1) % urls.length] ?? "", path, second.body).then((texts) =>
            expect(texts).toEqual(expected(second.body)),
          ),
        );
      }
      const answer = ask(urls[index % urls.length] ?? "", path, body).then((texts) => {
        expect(texts).toEqual(expected(body));
        answered(texts[0] ?? "");
      });
      together.push(answer);
      if (step.atOnce) continue;
      await Promise.all(together);
      together = [];
    }
    await Promise.all(together);
    await close();
    expect(turns.wrong).toEqual([]);
    await vi.waitFor(() => expect(turns.pinnedBlocks).toBe(0));
  } finally {
    await close();
    await Promise.all([prefill.close(), decode.close()]);
  }
  return turns;
}

test.each(["one", "two workers", "two routers"] as const)(
  "no conversation reads what does not fit, or what was read (issue 48, %s)",
  async (routers) => {
    let reads = 0;
    await fc.assert(
      fc.asyncProperty(
        fc.array(STEP, { minLength: 8, maxLength: 20, size: "max" }),
        async (steps) => {
          reads += (await run(steps, routers)).counts.reads;
        },
      ),
      { numRuns: isLongRun ? 150 : 6, seed: 48, endOnFailure: !isLongRun },
    );
    // Else it would show nothing.
    expect(reads).toBeGreaterThan(5);
  },
  120_000,
);
