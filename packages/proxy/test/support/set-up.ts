import {
  type Answer,
  decodeOk,
  type FakeUpstream,
  prefillOk,
  sendJson,
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

/** The instances of a list of answers. */
type Instances<Answers> = { readonly [At in keyof Answers]: FakeUpstream };

/** Fake instances, closed after the test. */
export const upstreams = <Answers extends readonly Answer[]>(...answers: Answers) =>
  Promise.all(answers.map((answer) => upstream(answer))) as Promise<Instances<Answers>>;

export interface RunningProxy {
  readonly proxy: ReturnType<typeof createProxy>;
  readonly url: string;
  readonly adminUrl: string;
  /** Asks for a completion, of the prompt "a" unless told. */
  ask(body?: object | string, init?: RequestInit): Promise<Response>;
  /** The metrics of the admin port. */
  metrics(): Promise<string>;
}

/** A proxy on a free port, closed without grace after the test. */
export async function runProxy(options: ProxyOptions): Promise<RunningProxy> {
  // A check would be a request more at the fake instances, which count.
  const proxy = createProxy({
    health: { intervalMs: 0 },
    // An answer of a fake instance names a side channel, which may be that of a real engine on this
    // machine.
    pairing: { mode: "off" },
    admin: { port: 0 },
    ...options,
  });
  onTestFinished(() => proxy.close({ graceMs: 0 }));
  const { url, adminUrl = "" } = await proxy.listen({ port: 0 });
  return {
    proxy,
    url,
    adminUrl,
    ask: (body = {}, init) =>
      post(
        `${url}/v1/completions`,
        typeof body === "string" ? body : { prompt: "a", ...body },
        init,
      ),
    metrics: async () => (await fetch(`${adminUrl}/metrics`)).text(),
  };
}

/** A proxy in front of instances of both roles. Where P pushes, its engine is known as `e`. */
export async function runFleet<
  const Ps extends readonly Answer[],
  const Ds extends readonly Answer[],
>(ps: Ps, ds: Ds, options: ProxyOptions = {}) {
  const [p, d] = [await upstreams(...ps), await upstreams(...ds)];
  const urlsOf = (instances: readonly FakeUpstream[]) => instances.map(({ url }) => url);
  const prefillers =
    (options.mode ?? "pull") === "pull"
      ? urlsOf(p)
      : urlsOf(p).map((url) => ({ url, kv: { engineId: "e" } }));
  const running = await runProxy({ prefillers, decoders: urlsOf(d), ...options });
  return { p, d, ...running };
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

/** Chooses the first instance, so that what failed must be avoided by name. */
export const FIRST: ProxyOptions = {
  createRouting: () => ({ name: "first", choose: (candidates) => candidates[0] }),
};

/** An instance that always answers so. */
export const sends =
  (status: number, body: object = { error: { message: "no" } }): Answer =>
  ({ response }) =>
    sendJson(response, body, status);

/** An instance that closes the connection. */
export const breaks: Answer = ({ response }) => void response.destroy();

/** A web page in place of an answer. */
export const html: Answer = ({ response }) =>
  void response.writeHead(200, { "content-type": "text/html" }).end("<html>busy</html>");

export function post(url: string, body: unknown, init: RequestInit = {}): Promise<Response> {
  return fetch(url, {
    method: "POST",
    ...init,
    headers: { "content-type": "application/json", ...(init.headers as Record<string, string>) },
    body: typeof body === "string" ? body : JSON.stringify(body),
  });
}

/** The status of an answer, and what its error says. */
export async function errorOf(response: Response) {
  const { error } = (await response.json()) as {
    error: { code: unknown; message: string; type: string; hint?: string };
  };
  return { status: response.status, ...error };
}

/** What a client gets where instances fail. */
export const UPSTREAM_FAILED = { status: 502, code: "KV_PROXY_UPSTREAM_FAILED" };
