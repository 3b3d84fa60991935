import type { Load, Measured } from "./honest-prompts.js";
import { ObservedProcess } from "./observed-process.js";

/** Honest clients in a process of their own. */
export class HonestClients extends ObservedProcess {
  static async start(load: Load): Promise<HonestClients> {
    const clients = new HonestClients("tools/attacks/support/honest-prompts.ts", [
      JSON.stringify(load),
    ]);
    await clients.line();
    return clients;
  }

  /** What they see while `work` is done. */
  async measure(work: () => Promise<unknown>): Promise<Measured> {
    this.tell("begin");
    await work();
    this.tell("end");
    return JSON.parse(await this.line()) as Measured;
  }
}
