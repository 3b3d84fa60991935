import { existsSync } from "node:fs";
import { freePort } from "@kv/testing/http/listening";
import { chooseTransport } from "../../../apps/demo/src/cluster/choose-transport.js";
import { ObservedProcess } from "../observed-process.js";
import type { Target } from "./attack.js";
import type { Load, Measured } from "./honest-clients.js";

/** Servers, with honest clients in another process. */
export interface Victim {
  readonly target: Partial<Target>;
  readonly processes: Readonly<Record<string, ObservedProcess>>;
  readonly honest: ObservedProcess;
  /** What no process may grow by, and no honest client may wait. */
  readonly mostMib: number;
  readonly mostWaitMs: number;
}

async function startClients(load: Load): Promise<ObservedProcess> {
  const args = [JSON.stringify(load)];
  const honest = new ObservedProcess("tools/hostile/attacks/honest-clients.ts", args);
  await honest.line();
  return honest;
}

export async function measure(honest: ObservedProcess, work: () => Promise<unknown>) {
  await honest.ask("begin");
  await work();
  return JSON.parse(await honest.ask("end")) as Measured;
}

/** kv-proxy in front of these instances. */
export async function startProxy(
  prefill: readonly string[],
  decode: readonly string[],
  flags: readonly string[] = [],
  file = "packages/proxy/src/cli.ts",
) {
  const ports = ["--port", "0", "--admin-port", "0", "--log-level", "silent"];
  const instances = ["--prefill", ...prefill, "--decode", ...decode];
  const proxy = new ObservedProcess(file, [...ports, ...instances, ...flags]);
  const [, proxyUrl = "", adminUrl = ""] =
    /ready (\S+) .* admin (\S+)/.exec(await proxy.line()) ?? [];

  return { proxy, proxyUrl, adminUrl };
}

async function proxyVictim(): Promise<Victim> {
  const instances = new ObservedProcess("tools/hostile/attacks/slow-instance.ts");
  const { prefill, decode } = JSON.parse(await instances.line()) as Record<string, number>;
  const at = (port: number | undefined) => [`127.0.0.1:${port}`];
  const { proxy, proxyUrl, adminUrl } = await startProxy(at(prefill), at(decode));
  const question = {
    url: `${proxyUrl}/v1/completions`,
    body: { prompt: "honest", max_tokens: 1 },
    wanted: '"token_ids":[1]',
  };

  return {
    target: { pid: proxy.pid, proxyUrl, adminUrl, countsUrl: `http://${at(prefill)}/counts` },
    processes: { proxy },
    honest: await startClients({ questions: [question], clients: 1, pauseMs: 20 }),
    mostMib: 512,
    mostWaitMs: 2000,
  };
}

async function sideChannelVictim(): Promise<Victim> {
  const listener = new ObservedProcess("tools/hostile/attacks/side-channel-victim.ts");
  const { port, http } = JSON.parse(await listener.line()) as { port: number; http: number };
  const clientUrl = `http://127.0.0.1:${http}`;

  return {
    target: { pid: listener.pid, sideChannel: port, clientUrl },
    processes: { listener },
    honest: await startClients({
      questions: [{ handshake: port }, { url: clientUrl, wanted: "ok" }],
      clients: 2,
      pauseMs: 50,
    }),
    mostMib: 256,
    mostWaitMs: 2000,
  };
}

async function benchVictim(): Promise<Victim> {
  const args = ["bench", "--listen", "127.0.0.1:0"];
  const bench = new ObservedProcess("packages/nixl/src/cli.ts", args);
  const benchPort = Number(/:(\d+);/.exec(await bench.line())?.[1]);
  const question = {
    port: benchPort,
    line: '{"do":"fill","seed":1}',
    wanted: "begins with open",
  };

  return {
    target: { pid: bench.pid, benchPort },
    processes: { bench },
    honest: await startClients({ questions: [question], clients: 1, pauseMs: 20 }),
    mostMib: 256,
    mostWaitMs: 2000,
  };
}

/** From source, each stack trace of an aborted connection would be translated. */
const [INSTANCE, PROXY] = ["apps/demo/dist/main.js", "packages/proxy/dist/cli.js"];

/** Why the demo's processes cannot run here. Throws where they are not built. */
export async function demoAbsence(): Promise<string | undefined> {
  for (const file of [INSTANCE, PROXY])
    if (!existsSync(new URL(`../../../${file}`, import.meta.url)))
      throw new Error(`${file} is missing: run npm run build`);
  return chooseTransport("nixl", () => {}).then(
    () => undefined,
    (error: Error) => error.message.split("\n")[0],
  );
}

/** A P and a D of the demo over NIXL, and kv-proxy. */
async function demoVictim(): Promise<Victim> {
  const sideChannel = await freePort();
  const instance = (role: "prefill" | "decode", sideChannelPort: number) => {
    const config = {
      role,
      sideChannelPort,
      numBlocks: 1024,
      prefixCaching: false,
      kvTransferConfig: {
        kv_connector: "NixlConnector",
        kv_role: role === "prefill" ? "kv_producer" : "kv_consumer",
      },
    };
    const args = ["instance", "--log-level", "silent", "--config", JSON.stringify(config)];
    return new ObservedProcess(INSTANCE, args);
  };
  const [P, D] = [instance("prefill", sideChannel), instance("decode", 0)];
  const urlOf = async (started: ObservedProcess) =>
    (JSON.parse(await started.line()) as { url: string }).url;
  const [prefillUrl, instanceUrl] = [await urlOf(P), await urlOf(D)];
  const at = (url: string) => [new URL(url).host];
  const { proxy, proxyUrl, adminUrl } = await startProxy(
    at(prefillUrl),
    at(instanceUrl),
    [],
    PROXY,
  );

  const questions = await Promise.all(
    Array.from({ length: 16 }, async (_, number) => {
      const prompt = Array.from(
        { length: 100 },
        (_, at) => 10 + ((number * 7919 + at * 104_729) % 200),
      );
      const body = {
        prompt,
        max_tokens: 8,
        temperature: 0,
        ignore_eos: true,
        return_token_ids: true,
      };
      const alone = await fetch(`${instanceUrl}/v1/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      const [wanted = ""] = /"token_ids":\[[\d,]+\]/.exec(await alone.text()) ?? [];
      return { url: `${proxyUrl}/v1/completions`, body, wanted };
    }),
  );
  if (questions.some(({ wanted }) => wanted === "")) throw new Error("an instance has no tokens");

  return {
    target: { pid: proxy.pid, proxyUrl, adminUrl, sideChannel, instanceUrl },
    processes: { P, D, proxy },
    honest: await startClients({ questions, clients: 2, pauseMs: 100 }),
    mostMib: 512,
    mostWaitMs: Number.POSITIVE_INFINITY,
  };
}

export const VICTIMS = {
  proxy: proxyVictim,
  "side-channel": sideChannelVictim,
  bench: benchVictim,
  demo: demoVictim,
};
