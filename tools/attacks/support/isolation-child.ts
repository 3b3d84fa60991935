import { fork } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { KvTransferParams } from "@kv/interface";
import type { Known } from "@kv/testing/isolation/attacks";
import type { Order, OrderAnswer } from "./isolation-engines.js";

type WithoutId<T> = T extends unknown ? Omit<T, "id"> : never;
interface Address {
  readonly host: string;
  readonly port: number;
}

/** A P, a D and a listener of an attacker in a process of their own (`isolation-engines.ts`). */
export class IsolationEngines {
  readonly #child = fork(fileURLToPath(new URL("./isolation-engines.ts", import.meta.url)), {
    execArgv: ["--import", "tsx"],
    stdio: ["ignore", "ignore", "inherit", "ipc"],
  });
  readonly #waiting = new Map<number, (answer: unknown) => void>();
  #orders = 0;

  constructor() {
    this.#child.on("message", ({ id, answer }: OrderAnswer) => this.#waiting.get(id)?.(answer));
  }

  /** Starts the engines. `extra`: the `kv_connector_extra_config` of P and D. */
  start(
    connector: "pull" | "push",
    extra: Readonly<Record<string, unknown>>,
  ): Promise<{ rogue: Address; prefill: Address }> {
    return this.#ask({ kind: "start", connector, extra });
  }

  /** The parameters that P's answer has. */
  readonly prefill = (request: string, prompt: number): Promise<KvTransferParams> =>
    this.#ask({ kind: "prefill", request, prompt });

  /** `ok`, or the error of D's answer. */
  readonly decode = (request: string, prompt: number, params: KvTransferParams): Promise<string> =>
    this.#ask({ kind: "decode", request, prompt, params });

  /** Sends P and D each forged notification; resolves with their number. */
  forge(known: Omit<Known, "decode">): Promise<number> {
    return this.#ask({ kind: "forge", known });
  }

  /** Where D has had bytes of another prompt. */
  async violations(): Promise<string[]> {
    return (await this.#ask<{ violations: string[] }>({ kind: "state" })).violations;
  }

  rssMib(): number {
    const pages = Number(readFileSync(`/proc/${this.#child.pid}/statm`, "utf8").split(" ")[1]);
    return Math.round((pages * 4096) / 2 ** 20);
  }

  close(): void {
    this.#child.disconnect();
  }

  #ask<T>(order: WithoutId<Order>): Promise<T> {
    this.#orders += 1;
    const id = this.#orders;
    this.#child.send({ ...order, id });
    return new Promise<T>((resolve) => this.#waiting.set(id, (answer) => resolve(answer as T)));
  }
}
