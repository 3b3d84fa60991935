import {
  type Answer,
  decodeOk,
  type FakeUpstream,
  prefillOk,
  startUpstream,
} from "@kv/testing/http/fake-upstream";
import { onTestFinished } from "vitest";
import { createProxy, type ProxyOptions } from "../../src/index.js";

/** A fake instance, closed after the test. */
export async function upstream(answer: Answer, port?: number): Promise<FakeUpstream> {
  const started = await startUpstream(answer, port);
  onTestFinished(() => started.close());
  return started;
}

export interface RunningProxy {
  readonly proxy: ReturnType<typeof createProxy>;
  readonly url: string;
  readonly adminUrl: string;
}

/** A proxy on a free port, closed without grace after the test. */
export async function runProxy(options: ProxyOptions): Promise<RunningProxy> {
  // A check would be a request more at the fake instances, which count.
  const proxy = createProxy({
    health: { intervalMs: 0 },
    // An answer of a fake instance names a side channel, which may be that of a real engine on this
    // machine.
    pairing: { mode: "off" },
    ...options,
  });
  onTestFinished(() => proxy.close({ graceMs: 0 }));
  const { url, adminUrl = "" } = await proxy.listen({ port: 0 });
  return { proxy, url, adminUrl };
}

/** A proxy in front of a prefill and a decode instance, which do their part unless told. */
export async function runPair(
  { p = prefillOk, d = decodeOk }: { readonly p?: Answer; readonly d?: Answer } = {},
  options: ProxyOptions = {},
) {
  const pair = { p: await upstream(p), d: await upstream(d) };
  const instances = { prefillers: [pair.p.url], decoders: [pair.d.url] };
  return { ...pair, ...(await runProxy({ ...instances, ...options })) };
}

export function post(url: string, body: unknown, init: RequestInit = {}): Promise<Response> {
  return fetch(url, {
    method: "POST",
    ...init,
    headers: { "content-type": "application/json", ...(init.headers as Record<string, string>) },
    body: typeof body === "string" ? body : JSON.stringify(body),
  });
}

export async function errorOf(
  response: Response,
): Promise<{ status: number; code: unknown; message: string; type: string }> {
  const { error } = (await response.json()) as {
    error: { code: unknown; message: string; type: string };
  };
  return { status: response.status, code: error.code, message: error.message, type: error.type };
}
