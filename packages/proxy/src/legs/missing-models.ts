import type { Instance } from "@kv/fleet";
import { putLast } from "@kv/fleet/front-end";
import type { Clock } from "@kv/interface";

/** Short, because instances may load a LoRA adapter at run time. */
const REMEMBERED_MS = 60_000;
/** Beyond this number, the model of which nothing was learned longest is forgotten. */
const MOST_MODELS = 1_000;
const LONGEST_NAME = 256;
const NONE: ReadonlySet<Instance> = new Set();

/** Learns from answers which instances lack a model that others have, such as a LoRA adapter. */
export class MissingModels {
  /** The time until which each instance lacks a model, by model. */
  readonly #byModel = new Map<string, Map<Instance, number>>();

  constructor(private readonly clock: Clock) {}

  add(model: unknown, instances: Iterable<Instance>): void {
    if (typeof model !== "string" || model.length > LONGEST_NAME) return;
    const known = this.#byModel.get(model) ?? new Map<Instance, number>();
    for (const instance of instances) known.set(instance, this.clock.now() + REMEMBERED_MS);
    putLast(this.#byModel, model, known, MOST_MODELS);
  }

  lacking(model: unknown): ReadonlySet<Instance> {
    const known = this.#byModel.get(String(model));
    if (known === undefined) return NONE;
    const nowMs = this.clock.now();
    return new Set(
      [...known].filter(([, untilMs]) => nowMs < untilMs).map(([instance]) => instance),
    );
  }
}
