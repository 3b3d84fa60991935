import { freePorts } from "@kv/testing/free-ports";
import { expect, test } from "vitest";
import { greedyOf, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { long } from "./front-suite.js";
import type { HttpTapOptions } from "./http-tap.js";
import { COMPLETIONS, type ProxyPair } from "./proxy-pair.js";

/** P must hold no blocks afterwards. */
export function proxyFaultSuite(pair: ProxyPair): void {
  /** The first D breaks its connections. Only clients' requests reach the servers. */
  async function proxiedAndCut(cutAt: HttpTapOptions["cutAt"]) {
    const cut = await pair.tap({ cutAt });
    const decoders = [cut.url, pair.d.url];
    const { url, proxy } = await pair.proxied({ decoders, health: { intervalMs: 0 } });
    const requests = () => {
      const status = proxy.status();
      return [...status.prefillers, ...status.decoders].map((each) => each.requests);
    };
    return { cut, url, requests };
  }

  test("D is unreachable: kv-proxy sends the decode request to the other D, without another prefill", async () => {
    const [dead = 0] = await freePorts(1);
    const { url, proxy } = await pair.proxied({
      decoders: [`http://127.0.0.1:${dead}`, pair.d.url],
    });
    const body = greedyOf(words(60, 8), 4);
    await pair.answersAlike(url, body);
    expect(proxy.status().prefillers[0]?.requests).toBe(1);
    await pair.freed();
  });

  test.each([
    ["a response", {}],
    ["a stream", { stream: true }],
  ])(
    "D breaks the connection before the first token of %s: kv-proxy retries with a new prefill and another D",
    async (_, more) => {
      const { cut, url, requests } = await proxiedAndCut(afterHead);
      const body = { ...greedyOf(words(60, 17), 4), ...more };
      await pair.answersAlike(url, body);
      expect(cut.heads).toHaveLength(1);
      expect(requests()).toEqual([2, 1, 1]);
      await pair.idle(pair.d);
      await pair.freed();
    },
  );

  test("D breaks the connection after the first token: no retry, and the client gets an error event and a broken stream", async () => {
    const { url, requests } = await proxiedAndCut(afterTwoEvents);
    const body = { ...long, prompt: words(60, 18), max_tokens: 200, stream: true };
    const right = await read(ask(pair.d.url + COMPLETIONS, body));
    const ours = await read(ask(url + COMPLETIONS, body));
    expect(textOf(ours.text)).not.toBe("");
    expect(textOf(right.text).startsWith(textOf(ours.text))).toBe(true);
    expect(ours.text).toContain("KV_PROXY_UPSTREAM_FAILED");
    expect(ours.text).not.toContain("[DONE]");
    expect([right.isBroken, ours.isBroken]).toEqual([false, true]);
    expect(requests()).toEqual([1, 1, 0]);
    await pair.idle(pair.d);
    await pair.freed();
  });

  test("request timeout: the stream ends with an error event, D stops, and P holds no blocks", async () => {
    const { url } = await pair.proxied({ timeouts: { requestMs: 3_000 } });
    const answer = await ask(url + COMPLETIONS, { ...long, stream: true });
    const text = await answer.text().catch(() => "");
    expect(text === "" || text.includes("KV_REQUEST_TIMEOUT")).toBe(true);
    expect(text).not.toContain("[DONE]");
    await pair.idle(pair.d);
    await pair.freed();
  });
}

function afterHead(answered: string): number | undefined {
  const end = answered.indexOf("\r\n\r\n");
  return end < 0 ? undefined : end + 4;
}

function afterTwoEvents(answered: string): number | undefined {
  const third = answered.split("data: ", 4).slice(0, 3).join("data: ");
  return third.length < answered.length ? third.length : undefined;
}

async function read(asked: Promise<Response>): Promise<{ text: string; isBroken: boolean }> {
  const decoder = new TextDecoder();
  let text = "";
  try {
    for await (const chunk of (await asked).body ?? [])
      text += decoder.decode(chunk, { stream: true });
    return { text, isBroken: false };
  } catch {
    return { text, isBroken: true };
  }
}

function textOf(stream: string): string {
  return Array.from(stream.matchAll(/"text":"((?:[^"\\]|\\.)*)"/g), ([, text = ""]) => text).join(
    "",
  );
}
