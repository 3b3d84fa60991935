import type { Log } from "@kv/interface";

/** Environment variables by name, as in `process.env`. */
export type Environment = Readonly<Record<string, string | undefined>>;

/** In order of precedence, after the option `library`. */
const LIBRARY_VARIABLES = ["KV_NIXL_LIBRARY", "NIXL_PREFIX"] as const;

export function nixlVariables(environment: Environment): Record<string, string> {
  const prefixes = /^(UCX|FI|NIXL)_/;
  return Object.fromEntries(
    Object.entries(environment).filter((entry): entry is [string, string] =>
      prefixes.test(entry[0]),
    ),
  );
}

/** Logs `nixl-variable-unused` for each variable that names a library but is overridden. */
export function warnOfUnusedLibraryVariables(choice: {
  readonly library: string | undefined;
  readonly environment: Environment;
  readonly log: Log;
}): void {
  const { library, environment, log } = choice;
  const set = LIBRARY_VARIABLES.flatMap((name) => {
    const value = environment[name];
    return value ? [{ name: name as string, value }] : [];
  });
  if (library !== undefined) set.unshift({ name: "the option library", value: library });
  const [winner, ...lost] = set;
  for (const { name, value } of lost) {
    const won = `${winner?.value} from ${winner?.name}`;
    log.warn("nixl-variable-unused", { name, value, won, why: `${winner?.name} comes first` });
  }
}
