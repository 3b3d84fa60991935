import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, beforeEach } from "vitest";
import { words } from "./boundary-cases.js";
import { ONE_USE, plain } from "./completion.js";
import { handshakeTimedOut, retryAfterTimeout } from "./retry-after-timeout.js";
import { PEER_DIR, showLogs, startVllm, type VllmOptions, type VllmServer } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";
import { until } from "./until.js";

/** One vLLM P and one vLLM D behind `kv-proxy`, and the state of P's blocks. */
export interface ProxyPair {
  readonly p: VllmServer;
  readonly d: VllmServer;
  /**
   * Opens a proxy for one test and closes it after the test. By default its servers are this P and
   * this D.
   */
  proxied(more?: Partial<ProxyOptions>): Promise<OpenProxy>;
  /**
   * Registers something to close after the test. Things are closed in the order of registration.
   */
  closing(what: { close(): Promise<void> }): void;
  /** The share of P's blocks that is in use. */
  held(): Promise<number>;
  /**
   * Waits until P has freed its blocks, at most half a lease, so that only a notification can have
   * freed them.
   */
  freed(): Promise<void>;
  /**
   * Waits until P holds no blocks, also by the end of a lease, so that the next test does not see
   * blocks of this one.
   */
  leaseEnded(): Promise<void>;
  idle(server: VllmServer): Promise<void>;
  /** Starts a further server with the options of P and D, and stops it after the suite. */
  start(role: string, more?: Partial<VllmOptions>): Promise<VllmServer>;
  /** Ends P or D, and starts it at the same addresses. */
  restart(role: "p" | "d", more?: Partial<VllmOptions>): Promise<void>;
}

/** Blocks that are freed before the end of the lease were freed by a notification. */
const LEASE_SECONDS = 45;
/** Enough for the blocks that toy proxies leave at P in half a minute. */
const BLOCKS = 400;
/**
 * The prompt contains the tools and the request's own template arguments, so that a server that did
 * not get them gives another answer.
 */
const TEMPLATE =
  "{% for m in messages %}{{ m['content'] }} {% endfor %}{% for t in tools or [] %}t{{ 500 + loop.index }} {% endfor %}{{ extra or '' }}";
/**
 * The text of calls of the tools `f` and `g` of `boundary-cases.ts`, as tokens. They replace the
 * last words of the vocabulary, which no prompt uses.
 */
const CALL_WORDS = [
  '[{"name":"f","parameters":',
  '[{"name":"g","parameters":',
  '{"a":',
  '"x"',
  '"y"',
  '"z"',
  "}",
  "}]",
  "]",
];
const FIRST_CALL_WORD = 1014;

export interface PairOptions {
  /** Keys of `kv_connector_extra_config`. */
  readonly extra?: Readonly<Record<string, unknown>>;
  /**
   * Each word of a text is one token, so that an answer has the same tokens in the next prompt.
   * Else `t277` is the special token `t2` and something unknown.
   */
  readonly hasWholeWords?: boolean;
}

/**
 * Starts both servers, with `more` arguments, before the tests of a suite and stops them after it.
 */
export function proxyPair(
  kind: PeerKind,
  base: Partial<ProxyOptions> = {},
  more: readonly string[] = [],
  { extra = {}, hasWholeWords = false }: PairOptions = {},
): ProxyPair {
  const folder = mkdtempSync(join(tmpdir(), "kv-proxy-live-"));
  const open: { close(): Promise<void> }[] = [];
  const servers = new Map<string, VllmServer>();
  let unused = 0;
  const started = (role: string) => {
    const server = servers.get(role);
    if (server === undefined) throw new Error(`${role} was not started`);
    return server;
  };
  const used = () => started("p").metric("vllm:kv_cache_usage_perc");
  async function start(role: string, options: Partial<VllmOptions> = {}): Promise<VllmServer> {
    const server = await startVllm({
      kind,
      name: `proxy-${kind.mode}-${kind.version}-${role}`,
      blocks: BLOCKS,
      extra,
      leaseSeconds: LEASE_SECONDS,
      ...options,
      args: [...argumentsOf(folder, hasWholeWords), ...more, ...(options.args ?? [])],
    });
    servers.set(role, server);
    return server;
  }

  /**
   * Waits until P holds nothing. P handles notifications and leases only when it computes
   * something, so each check sends it a small request.
   */
  function holdsNothing(what: string, timeoutMs: number): Promise<void> {
    const holds = async () => {
      await plain(started("p").url, [20, 30], 1);
      return (await used()) <= unused;
    };
    return until(holds, what, { timeoutMs });
  }

  const pair: ProxyPair = {
    get p() {
      return started("p");
    },
    get d() {
      return started("d");
    },
    async proxied(more = {}) {
      const opened = await openProxy({
        prefillers: [pair.p.url],
        decoders: [pair.d.url],
        ...base,
        ...more,
      });
      pair.closing(opened);
      return opened;
    },
    held: used,
    closing: (what) => void open.push(what),
    freed: () => holdsNothing("P has freed its blocks", (LEASE_SECONDS * 1000) / 2),
    leaseEnded: () => holdsNothing("the lease has ended", 4 * LEASE_SECONDS * 1000),
    idle: (server) =>
      until(
        async () => (await server.metric("vllm:num_requests_running")) === 0,
        `${server.name} is idle`,
      ),
    start,
    async restart(role, options) {
      const { port, sideChannelPort, stop } = started(role);
      await stop();
      await start(role, { ports: [port, sideChannelPort], ...options });
    },
  };

  beforeAll(async () => {
    // In parallel, because most of the start is spent in Python imports.
    const [p, d] = await Promise.all([start("p"), start("d")]);
    unused = await used();
    const { url, close } = await openProxy({ prefillers: [p.url], decoders: [d.url], ...base });
    const timeouts = [p, d].map(handshakeTimedOut);
    // The pair's first handshake. On a busy machine it may take longer than the five seconds that
    // vLLM allows.
    await retryAfterTimeout(
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
    await Promise.all([...servers.values()].map((server) => server.stop()));
    rmSync(folder, { recursive: true, force: true });
  });
  beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(...servers.values())));
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
    headers: {
      "content-type": "application/json",
      ...ONE_USE,
      ...(init.headers as Record<string, string>),
    },
    body: JSON.stringify(body),
  });
}

/**
 * Arguments of servers whose tokenizer has the words of calls, and whose template shows tools. Its
 * files are written into `folder`.
 */
export function argumentsOf(folder: string, hasWholeWords = false): string[] {
  const template = join(folder, "template.jinja");
  writeFileSync(template, TEMPLATE);
  const model = join(PEER_DIR, "tiny-qwen3");
  const tokenizer = JSON.parse(readFileSync(join(model, "tokenizer.json"), "utf8")) as Tokenizer;
  const { vocab } = tokenizer.model;
  for (const [index, word] of CALL_WORDS.entries()) {
    delete vocab[`t${FIRST_CALL_WORD + index}`];
    vocab[word] = FIRST_CALL_WORD + index;
  }
  if (hasWholeWords) for (const token of tokenizer.added_tokens) token.single_word = true;
  writeFileSync(join(folder, "tokenizer.json"), JSON.stringify(tokenizer));
  for (const name of ["tokenizer_config.json", "config.json"])
    writeFileSync(join(folder, name), readFileSync(join(model, name)));
  return [
    "--chat-template",
    template,
    "--tokenizer",
    folder,
    // This parser accepts calls in the plain JSON that guided decoding generates.
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "xlam",
    "--enable-request-id-headers",
    "--enable-prompt-tokens-details",
  ];
}

interface Tokenizer {
  readonly added_tokens: readonly { single_word: boolean }[];
  readonly model: { readonly vocab: Record<string, number> };
}
