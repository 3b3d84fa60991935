import { existsSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { chooseTransport } from "../../../apps/demo/src/cluster/choose-transport.js";
import { freePort } from "../../bench/child-processes.js";
import type { FloodTarget } from "./attack.js";
import { HonestClients } from "./honest-clients.js";
import type { Measured } from "./honest-prompts.js";
import { ObservedProcess } from "./observed-process.js";

const PROMPTS = 16;
const PROMPT_TOKENS = 100;
const OUTPUT_TOKENS = 8;
/**
 * The built programs, which users run. From source, each stack trace of an aborted connection would
 * be translated to TypeScript.
 */
const [INSTANCE, PROXY] = ["apps/demo/dist/main.js", "packages/proxy/dist/cli.js"];

/**
 * Why the demo's processes cannot run here; undefined where they can. Throws where they are not
 * built.
 */
export async function demoAbsence(): Promise<string | undefined> {
  for (const file of [INSTANCE, PROXY])
    if (!existsSync(new URL(`../../../${file}`, import.meta.url)))
      throw new Error(`${file} is missing: run npm run build`);
  try {
    await chooseTransport("nixl", () => {});
    return undefined;
  } catch (error) {
    return (error as Error).message.split("\n")[0];
  }
}

/**
 * A prefill and a decode instance and the proxy, each in a process of its own, and honest clients
 * in another one.
 */
export class Demo {
  readonly target: FloodTarget;
  readonly processes: Readonly<Record<"P" | "D" | "proxy", ObservedProcess>>;
  readonly #clients: HonestClients;

  private constructor(target: FloodTarget, processes: Demo["processes"], clients: HonestClients) {
    this.target = target;
    this.processes = processes;
    this.#clients = clients;
  }

  static async start(): Promise<Demo> {
    const sideChannelPort = await freePort();
    const instance = (role: "prefill" | "decode", port: number) =>
      new ObservedProcess(INSTANCE, [
        "instance",
        "--log-level",
        "silent",
        "--config",
        JSON.stringify({
          role,
          sideChannelPort: port,
          numBlocks: 1024,
          // Each request transfers its KV.
          prefixCaching: false,
          kvTransferConfig: {
            kv_connector: "NixlConnector",
            kv_role: role === "prefill" ? "kv_producer" : "kv_consumer",
          },
        }),
      ]);
    const [P, D] = [instance("prefill", sideChannelPort), instance("decode", 0)];
    const urlOf = async (started: ObservedProcess) =>
      (JSON.parse(await started.line()) as { url: string }).url;
    const [prefillUrl, decodeUrl] = await Promise.all([urlOf(P), urlOf(D)]);
    const host = (url: string) => url.replace("http://", "");
    const proxy = new ObservedProcess(PROXY, [
      "--prefill",
      host(prefillUrl),
      "--decode",
      host(decodeUrl),
      "--port",
      "0",
      "--admin-port",
      "0",
      "--log-level",
      "silent",
    ]);
    const [, proxyUrl = "", adminUrl = ""] =
      /ready (\S+) .* admin (\S+)/.exec(await proxy.line()) ?? [];
    // The right answers are those of one instance alone.
    const prompts = Array.from({ length: PROMPTS }, (_, i) =>
      Array.from({ length: PROMPT_TOKENS }, (_, at) => 10 + ((i * 7919 + at * 104_729) % 200)),
    );
    const expected: number[][] = [];
    for (const prompt of prompts) expected.push(await answerOf(decodeUrl, prompt));
    const load = { url: proxyUrl, prompts, expected, clients: 2, pauseMs: 100, warmUp: 0 };
    const clients = await HonestClients.start(load);
    const sideChannel = { host: "127.0.0.1", port: sideChannelPort };
    return new Demo({ proxyUrl, adminUrl, sideChannel, decodeUrl }, { P, D, proxy }, clients);
  }

  /** Sends honest requests through the proxy for some seconds. */
  measure(seconds: number): Promise<Measured> {
    return this.#clients.measure(() => sleep(seconds * 1000));
  }

  close(): void {
    for (const each of [this.#clients, ...Object.values(this.processes)]) each.kill();
  }
}

async function answerOf(url: string, prompt: readonly number[]): Promise<number[]> {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      prompt,
      max_tokens: OUTPUT_TOKENS,
      temperature: 0,
      ignore_eos: true,
      return_token_ids: true,
    }),
  });
  const answer = (await response.json()) as { choices: { token_ids: number[] }[] };
  return answer.choices[0]?.token_ids ?? [];
}
