import { KvError } from "@kv/interface";
import { DEFAULT_SOURCE, selectBackends } from "../../backends/select-backends.js";
import type { Environment } from "../../environment.js";
import type { Check } from "../report.js";

/** The library and the backends that the caller of the doctor requests. They take precedence over the environment. */
export interface DoctorRequest {
  /** Path of `libnixl_capi.so`. */
  readonly library?: string | undefined;
  /** Names of backends. */
  readonly backends?: readonly string[] | undefined;
}

/** The backends that the doctor checks. */
export interface RequestedBackends {
  /** Their names; empty when the selection itself fails. */
  readonly names: readonly string[];
  /** The selection and its source. */
  readonly check: Check;
  /** Arguments and variables with which a probe selects one of them from the same source, so that its errors name that source. */
  selectInProbe(name: string): { args: readonly string[]; env: Environment };
}

/** The name of the option that sets `DoctorRequest.backends`. */
export const BACKEND_OPTION = "the option --backend";

/** The backends that the request or the environment selects, and the setting that selected them. */
export function requestedBackends(environment: Environment, request: DoctorRequest): RequestedBackends {
  const check = { id: "variables.backend", area: "variables", title: "selected backend" } as const;
  try {
    const { backends, source } = selectBackends({
      explicit: request.backends,
      option: BACKEND_OPTION,
      environment,
    });
    const names = backends.map(({ name }) => name);
    const byDefault = source === DEFAULT_SOURCE;
    const found = `${names.join(", ")}, ${byDefault ? "by default" : `from ${source}`}`;
    return {
      names,
      check: { ...check, status: "note", found, details: { backends: names, source } },
      selectInProbe: (name) =>
        source === BACKEND_OPTION
          ? { args: [name], env: {} }
          : { args: [], env: byDefault ? {} : { [source]: name } },
    };
  } catch (error) {
    const {
      message,
      code,
      hint = "such as UCX or LIBFABRIC",
    } = KvError.from(error, "KV_INTERNAL", "no backend is selected");
    return {
      names: [],
      check: { ...check, status: "fail", found: `${message} [${code}]`, fix: hint },
      selectInProbe: (name) => ({ args: [name], env: {} }),
    };
  }
}
