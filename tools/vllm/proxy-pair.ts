import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, beforeEach } from "vitest";
import { words } from "./boundary-cases.js";
import { ONE_USE, plain } from "./completion.js";
import { handshakeTimeouts, onceMoreAfterTimeout } from "./once-more.js";
import { PEER_DIR, showLogs, startVllm, type VllmServer } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";
import { until } from "./until.js";

/** One vLLM P and one vLLM D with `kv-proxy` in front, and what P holds. */
export interface ProxyPair {
  readonly p: VllmServer;
  readonly d: VllmServer;
  /** A proxy of its own for a test, closed behind it; in front of the two unless told otherwise. */
  proxied(more?: Partial<ProxyOptions>): Promise<OpenProxy>;
  /** Closed behind the test, in this order. */
  closing(what: { close(): Promise<void> }): void;
  /** The share of P's blocks that is in use. */
  held(): Promise<number>;
  /** P has freed its blocks long before their lease ends: somebody said so. */
  freed(): Promise<void>;
  /** P holds nothing, by whatever way: what a test has left there is not to be taken for the next one's. */
  leaseEnded(): Promise<void>;
  idle(server: VllmServer): Promise<void>;
}

/** Blocks that are freed before it are freed because somebody said so; after it, because nobody came. */
const LEASE_SECONDS = 45;
/** Room for what naive proxies leave at P in half a minute. */
const BLOCKS = 400;
/** Renders the tools and the request's own arguments too, so that a server that did not get them answers something else. */
const TEMPLATE =
  "{% for m in messages %}{{ m['content'] }} {% endfor %}{% for t in tools or [] %}t{{ 500 + loop.index }} {% endfor %}{{ extra or '' }}";
/** In place of the vocabulary's last words, which no prompt has: what calls of the tools `f` and `g` of `boundary-cases.ts` are made of. */
const CALL_WORDS = [
  ...['[{"name":"f","parameters":', '[{"name":"g","parameters":', '{"a":', '"x"', '"y"', '"z"', "}", "}]"],
  "]",
];
const FIRST_CALL_WORD = 1014;

/** Starts the two before the tests of a suite, and stops them behind. */
export function proxyPair(kind: PeerKind, ahead: Partial<ProxyOptions> = {}): ProxyPair {
  const folder = mkdtempSync(join(tmpdir(), "kv-proxy-live-"));
  const open: { close(): Promise<void> }[] = [];
  let p: VllmServer | undefined;
  let d: VllmServer | undefined;
  let unused = 0;
  const started = (server: VllmServer | undefined) => {
    if (server === undefined) throw new Error("the pair was not started");
    return server;
  };
  const used = () => started(p).metric("vllm:kv_cache_usage_perc");

  /** P looks at notifications, and at leases, when it computes something. */
  function holdsNothing(what: string, timeoutMs: number): Promise<void> {
    const holds = async () => {
      await plain(started(p).url, [20, 30], 1);
      return (await used()) <= unused;
    };
    return until(holds, what, { timeoutMs });
  }

  const pair: ProxyPair = {
    get p() {
      return started(p);
    },
    get d() {
      return started(d);
    },
    async proxied(more = {}) {
      const opened = await openProxy({ prefillers: [pair.p.url], decoders: [pair.d.url], ...ahead, ...more });
      pair.closing(opened);
      return opened;
    },
    held: used,
    closing: (what) => void open.push(what),
    freed: () => holdsNothing("P has freed its blocks", (LEASE_SECONDS * 1000) / 2),
    leaseEnded: () => holdsNothing("the lease has ended", 4 * LEASE_SECONDS * 1000),
    idle: (server) =>
      until(async () => (await server.metric("vllm:num_requests_running")) === 0, `${server.name} is idle`),
  };

  beforeAll(async () => {
    const common = { kind, blocks: BLOCKS, leaseSeconds: LEASE_SECONDS, args: argumentsOf(folder) };
    const name = (role: string) => `proxy-${kind.mode}-${kind.version}-${role}`;
    // Both at once: the time goes into imports.
    [p, d] = await Promise.all([
      startVllm({ name: name("p"), ...common }),
      startVllm({ name: name("d"), ...common }),
    ]);
    unused = await used();
    const { url, close } = await openProxy({ prefillers: [p.url], decoders: [d.url], ...ahead });
    const timeouts = [p, d].map(handshakeTimeouts);
    // The pair's first handshake, which on a busy machine may miss vLLM's five seconds.
    await onceMoreAfterTimeout(
      async () => {
        const body = { model: "tiny", prompt: words(40, 9), max_tokens: 1 };
        const answer = await ask(`${url}/v1/completions`, body);
        if (answer.status !== 200) throw new Error(await answer.text());
      },
      () => timeouts.map((timedOut) => timedOut()).includes(true),
    );
    await close();
  });
  afterAll(async () => {
    await Promise.all([p?.stop(), d?.stop()]);
    rmSync(folder, { recursive: true, force: true });
  });
  beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(p, d)));
  afterEach(async () => {
    for (const one of open.splice(0)) await one.close();
  });
  return pair;
}

export type OpenProxy = Awaited<ReturnType<typeof openProxy>>;

async function openProxy(options: ProxyOptions) {
  const proxy = createProxy(options);
  const { url } = await proxy.listen({ port: 0 });
  return { url, proxy, close: () => proxy.close({ graceMs: 0 }) };
}

export function ask(url: string, body: unknown, init: RequestInit = {}): Promise<Response> {
  return fetch(url, {
    method: "POST",
    ...init,
    headers: { "content-type": "application/json", ...ONE_USE, ...(init.headers as Record<string, string>) },
    body: JSON.stringify(body),
  });
}

function argumentsOf(folder: string): string[] {
  const template = join(folder, "template.jinja");
  writeFileSync(template, TEMPLATE);
  const model = join(PEER_DIR, "tiny-qwen3");
  const tokenizer = JSON.parse(readFileSync(join(model, "tokenizer.json"), "utf8")) as Tokenizer;
  const { vocab } = tokenizer.model;
  for (const [index, word] of CALL_WORDS.entries()) {
    delete vocab[`t${FIRST_CALL_WORD + index}`];
    vocab[word] = FIRST_CALL_WORD + index;
  }
  writeFileSync(join(folder, "tokenizer.json"), JSON.stringify(tokenizer));
  for (const name of ["tokenizer_config.json", "config.json"])
    writeFileSync(join(folder, name), readFileSync(join(model, name)));
  return [
    ...["--chat-template", template, "--tokenizer", folder],
    // A parser whose calls are the plain JSON that guided decoding makes.
    ...["--enable-auto-tool-choice", "--tool-call-parser", "xlam"],
    ...["--enable-request-id-headers", "--enable-prompt-tokens-details"],
  ];
}

interface Tokenizer {
  readonly model: { readonly vocab: Record<string, number> };
}
