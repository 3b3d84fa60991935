import { setTimeout as sleep } from "node:timers/promises";
import type { InstanceSpecInput } from "../../../packages/fleet/src/instances/instance-spec.js";
import type { PartOptions } from "../main.js";
import type { ObservedProcess } from "../observed-process.js";
import type { Check } from "../row.js";

const GROWTH_LIMIT = 1.25;
const SLOW_MS = 3_000;

/** Counts what came of requests and changes. */
export class Tally {
  readonly #counts = new Map<string, number>();
  readonly #reasons = new Map<string, string>();

  add(what: string, reason?: string): void {
    this.#counts.set(what, this.of(what) + 1);
    if (reason !== undefined) this.#reasons.set(what, reason);
  }

  of(what: string): number {
    return this.#counts.get(what) ?? 0;
  }

  /** `wanted` must have happened, and none of `bad`. */
  checks(wanted: string, bad: readonly string[]): Check[] {
    return [
      [`${this.of(wanted)} ${wanted}`, this.of(wanted) > 0],
      ...[...this.#counts]
        .filter(([what]) => what !== wanted)
        .map(([what, count]): Check => {
          const isBad = bad.includes(what);
          return [`${count} ${what}${isBad ? `: ${this.#reasons.get(what)}` : ""}`, !isBad];
        }),
    ];
  }
}

/** The proxy's memory must not grow. */
export async function soak(
  { minutes, clients, "every-s": everyS }: PartOptions,
  proxy: ObservedProcess,
  ask: (client: number) => Promise<unknown>,
  change: (turn: number) => Promise<unknown>,
): Promise<Check[]> {
  const endAtMs = Date.now() + minutes * 60_000;
  const everyMs = Number(everyS) * 1_000;
  const sizes = proxy.watch();
  const client = async (_: unknown, number: number) => {
    while (Date.now() < endAtMs) await ask(number);
  };
  const changes = async () => {
    for (let turn = 0; Date.now() + everyMs < endAtMs; turn += 1) {
      await sleep(everyMs);
      await change(turn);
    }
  };
  await Promise.all([changes(), ...Array.from({ length: Number(clients) }, client)]);

  const { early, late } = sizes();
  return [[`${early} → ${late} MiB`, late / early <= GROWTH_LIMIT]];
}

/** No request may be in flight for longer than five seconds. */
export async function endProxy(proxy: ObservedProcess, url: string): Promise<Check[]> {
  let inFlight = 1;
  for (let attempt = 0; inFlight > 0 && attempt < 50; attempt += 1) {
    await sleep(100);
    const status = (await (await fetch(`${url}/status`)).json()) as {
      requests: { in_flight: number };
    };
    inFlight = status.requests.in_flight;
  }
  const code = await proxy.end("SIGTERM");
  return [
    [`${inFlight} in flight`, inFlight === 0],
    [`exit code ${code}`, code === 0],
  ];
}

export class Cut extends Error {}

export interface SendOptions {
  readonly signal?: AbortSignal | undefined;
  readonly requestId?: string;
  readonly pauseMs?: number;
}

export async function send(
  url: string,
  body: object | undefined,
  { signal, requestId = "alone", pauseMs = 0 }: SendOptions = {},
): Promise<{ status: number; text: string }> {
  const response = await fetch(url, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? null : JSON.stringify(body),
    headers: { "content-type": "application/json", "x-request-id": requestId },
    signal: signal ?? null,
  });
  const decoder = new TextDecoder();
  const slowUntilMs = Date.now() + SLOW_MS;
  let text = "";
  try {
    for await (const chunk of response.body ?? []) {
      text += decoder.decode(chunk as Uint8Array, { stream: true });
      if (pauseMs > 0 && Date.now() < slowUntilMs) await sleep(pauseMs);
    }
  } catch (error) {
    throw text === "" ? error : new Cut(`after ${text.length} characters: ${error}`);
  }
  return { status: response.status, text };
}

interface ListedInstance {
  readonly url: string;
  readonly available: boolean;
  readonly in_flight: number;
}

/** A drained one has no requests when it resolves. */
export async function changeInstance(
  adminUrl: string,
  what: "add" | "drain",
  role: "prefill" | "decode",
  instance: InstanceSpecInput,
): Promise<void> {
  const url = typeof instance === "string" ? instance : instance.url;
  for (;;) {
    const { status, text } = await send(`${adminUrl}/instances/${what}`, { role, instance });
    if (status !== 200) throw new Error(`${what} ${url}: ${text}`);
    const list = JSON.parse(text) as readonly ListedInstance[];
    if (what === "add" || !list.find((one) => one.url === url)?.in_flight) return;
    await sleep(20);
  }
}

export async function allAvailable(adminUrl: string): Promise<void> {
  for (;;) {
    const status = JSON.parse((await send(`${adminUrl}/status`, undefined)).text) as Record<
      "prefillers" | "decoders",
      readonly ListedInstance[]
    >;
    if ([...status.prefillers, ...status.decoders].every(({ available }) => available)) return;
    await sleep(50);
  }
}
