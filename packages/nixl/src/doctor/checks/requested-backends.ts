import { KvError, silentLog } from "@kv/interface";
import { DEFAULT_SOURCE, resolveBackends } from "../../backends/select-backends.js";
import type { Environment } from "../../library/find-library.js";
import type { Check } from "../report.js";

/** What the doctor was asked to look at, before what the environment names. */
export interface Asked {
  readonly library?: string;
  readonly backends?: readonly string[];
}

export interface Choice {
  /** Empty where the choice itself fails. */
  readonly backends: readonly string[];
  readonly check: Check;
  /** How a process asks for one of them just as it was asked for here, so that its errors name who did. */
  askFor(name: string): { args: readonly string[]; env: Environment };
}

/** Who asks for `Asked.backends`, in words for the command line and for programs. */
export const ASKER = "the option --backend";

/** The backends, and by whose word. */
export function choiceOf(environment: Environment, { backends: explicit }: Asked): Choice {
  const check = { id: "variables.backend", area: "variables", title: "choice of backend" } as const;
  try {
    const chosen = resolveBackends({ explicit, asker: ASKER, environment, log: silentLog });
    const { source } = chosen;
    const backends = chosen.backends.map(({ name }) => name);
    const byDefault = source === DEFAULT_SOURCE;
    const found = `${backends.join(", ")}, ${byDefault ? "by default" : `from ${source}`}`;
    return {
      backends,
      check: { ...check, status: "note", found, details: { backends, source } },
      askFor: (name) =>
        source === ASKER ? { args: [name], env: {} } : { args: [], env: byDefault ? {} : { [source]: name } },
    };
  } catch (error) {
    const {
      message,
      code,
      hint = "such as UCX or LIBFABRIC",
    } = KvError.from(error, "KV_INTERNAL", "no choice");
    return {
      backends: [],
      check: { ...check, status: "fail", found: `${message} [${code}]`, fix: hint },
      askFor: (name) => ({ args: [name], env: {} }),
    };
  }
}
