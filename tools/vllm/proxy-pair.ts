import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, expect } from "vitest";
import { comparable, greedyOf, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { untilFreed, usage } from "./held-blocks.js";
import { type HttpTapOptions, startHttpTap } from "./http-tap.js";
import { PEER_DIR, type VllmOptions, type VllmServer, vllmServers } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";
import { handshakeTimedOut, retryAfterTimeout, until } from "./until.js";

export type ProxyPair = ReturnType<typeof proxyPair>;

export const COMPLETIONS = "/v1/completions";

/** What is freed before its end was freed by a notification. */
const LEASE_SECONDS = 45;
const BLOCKS = 400;
/** A server that did not get tools and template arguments answers otherwise. */
const TEMPLATE =
  "{% for m in messages %}{{ m['content'] }} {% endfor %}{% for t in tools or [] %}t{{ 500 + loop.index }} {% endfor %}{{ extra or '' }}";
/** In place of words that no prompt uses. */
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
  readonly base?: Partial<ProxyOptions>;
  readonly args?: readonly string[];
  readonly extra?: VllmOptions["extra"];
  /**
   * Each word is one token, so that an answer has the same tokens in the next prompt. Else `t277`
   * is `t2` and something unknown.
   */
  readonly hasWholeWords?: boolean;
}

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
    async proxied(more: Partial<ProxyOptions> = {}): Promise<OpenProxy> {
      const own = { prefillers: [p().url], decoders: [d().url] };
      return closing(await openProxy({ ...own, ...base, ...more }));
    },
    closing,
    tap: async (options?: HttpTapOptions, target = d().url): ReturnType<typeof startHttpTap> =>
      closing(await startHttpTap(target, options)),
    async answersAlike(url: string, body: unknown): Promise<unknown> {
      const right = await comparable(await ask(d().url + COMPLETIONS, body));
      expect(await comparable(await ask(url + COMPLETIONS, body))).toEqual(right);
      return right;
    },
    held: () => usage(p()),
    /** At most half a lease: only a notification can have freed P's blocks. */
    freed: () => untilFreed(p(), unused, (LEASE_SECONDS * 1000) / 2),
    /** Also by the end of a lease, for the next test's sake. */
    leaseEnded: () => untilFreed(p(), unused, 4 * LEASE_SECONDS * 1000),
    idle: (server: VllmServer) =>
      until(
        async () => (await server.metric("vllm:num_requests_running")) === 0,
        `${server.name} is idle`,
      ),
    start: servers.start,
    restart: servers.restart,
  };

  beforeAll(async () => {
    // Most of the start is spent in Python imports.
    await Promise.all([servers.start("p"), servers.start("d")]);
    unused = await usage(p());
    const own = { prefillers: [p().url], decoders: [d().url] };
    const { url, close } = await openProxy({ ...own, ...base });
    await retryAfterTimeout(
      async () => {
        const body = greedyOf(words(40, 9), 1);
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

export async function openProxy(options: ProxyOptions) {
  const proxy = createProxy(options);
  const { url } = await proxy.listen({ port: 0 });
  const close = () => proxy.close({ graceMs: 0 });
  return { url, proxy, close, [Symbol.asyncDispose]: close };
}

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
    // It accepts calls in the plain JSON that guided decoding generates.
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
