import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, expect } from "vitest";
import { comparable, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { untilFreed, usage } from "./held-blocks.js";
import { type HttpTapOptions, startHttpTap } from "./http-tap.js";
import { PEER_DIR, type VllmOptions, type VllmServer, vllmServers } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";
import { startToyProxy } from "./toy-proxy.js";
import { handshakeTimedOut, retryAfterTimeout, until } from "./until.js";

/** One vLLM P and one vLLM D behind `kv-proxy`, and the state of P's blocks. */
export type ProxyPair = ReturnType<typeof proxyPair>;

export const COMPLETIONS = "/v1/completions";

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
  /** Of the proxy. */
  readonly base?: Partial<ProxyOptions>;
  /** Of both servers. */
  readonly args?: readonly string[];
  readonly extra?: VllmOptions["extra"];
  /**
   * Each word of a text is one token, so that an answer has the same tokens in the next prompt.
   * Else `t277` is the special token `t2` and something unknown.
   */
  readonly hasWholeWords?: boolean;
}

/** Starts both servers before the tests of a suite and stops them after it. */
export function proxyPair(
  kind: PeerKind,
  { base = {}, args = [], extra = {}, hasWholeWords = false }: PairOptions = {},
) {
  const folder = mkdtempSync(join(tmpdir(), "kv-proxy-live-"));
  const open: { close(): Promise<void> }[] = [];
  const servers = vllmServers({
    kind,
    extra,
    blocks: BLOCKS,
    leaseSeconds: LEASE_SECONDS,
    args: [...argumentsOf(folder, hasWholeWords), ...args],
  });
  let unused = 0;

  const [p, d] = [() => servers.of("p"), () => servers.of("d")];
  /** Registers something to close after the test, in the order of registration. */
  function closing<T extends { close(): Promise<void> }>(what: T): T {
    open.push(what);
    return what;
  }

  const pair = {
    kind,
    get p(): VllmServer {
      return p();
    },
    get d(): VllmServer {
      return d();
    },
    /** Opens a proxy for one test. By default its servers are this P and this D. */
    async proxied(more: Partial<ProxyOptions> = {}): Promise<OpenProxy> {
      const own = { prefillers: [p().url], decoders: [d().url] };
      return closing(await openProxy({ ...own, ...base, ...more }));
    },
    closing,
    /** The URL of a toy proxy for one test. */
    toy: async (prefiller = p().url, decoder = d().url): Promise<string> =>
      closing(await startToyProxy(prefiller, decoder)).url,
    /** A tap in front of a server for one test; by default in front of D. */
    tap: async (options?: HttpTapOptions, target = d().url): ReturnType<typeof startHttpTap> =>
      closing(await startHttpTap(target, options)),
    /** Expects that the server at `url` answers a request as D does alone. Returns the answer. */
    async answersAlike(url: string, body: unknown): Promise<unknown> {
      const right = await comparable(await ask(d().url + COMPLETIONS, body));
      expect(await comparable(await ask(url + COMPLETIONS, body))).toEqual(right);
      return right;
    },
    /** The share of P's blocks that is in use. */
    held: () => usage(p()),
    /** Waits for at most half a lease, so that only a notification can have freed P's blocks. */
    freed: () => untilFreed(p(), unused, (LEASE_SECONDS * 1000) / 2),
    /** Waits until P holds no blocks, also by the end of a lease, for the sake of the next test. */
    leaseEnded: () => untilFreed(p(), unused, 4 * LEASE_SECONDS * 1000),
    idle: (server: VllmServer) =>
      until(
        async () => (await server.metric("vllm:num_requests_running")) === 0,
        `${server.name} is idle`,
      ),
    /** Starts a further server with the options of P and D. */
    start: servers.start,
    restart: servers.restart,
  };

  beforeAll(async () => {
    // In parallel, because most of the start is spent in Python imports.
    await Promise.all([servers.start("p"), servers.start("d")]);
    unused = await usage(p());
    const own = { prefillers: [p().url], decoders: [d().url] };
    const { url, close } = await openProxy({ ...own, ...base });
    await retryAfterTimeout(
      async () => {
        const body = { model: "tiny", prompt: words(40, 9), max_tokens: 1 };
        const answer = await ask(url + COMPLETIONS, body);
        if (answer.status !== 200) throw new Error(await answer.text());
      },
      handshakeTimedOut(p(), d()),
    );
    await close();
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));
  afterEach(async () => {
    for (const one of open.splice(0)) await one.close();
  });
  return pair;
}

export type OpenProxy = Awaited<ReturnType<typeof openProxy>>;

/** A proxy on a free port. */
export async function openProxy(options: ProxyOptions) {
  const proxy = createProxy(options);
  const { url } = await proxy.listen({ port: 0 });
  return { url, proxy, close: () => proxy.close({ graceMs: 0 }) };
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
