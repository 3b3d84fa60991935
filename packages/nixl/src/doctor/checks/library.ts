import { basename, dirname } from "node:path";
import { KvError } from "@kv/interface";
import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import { remedyFor } from "../../backends/plugins.js";
import type { Environment } from "../../environment.js";
import { cLibraryProblem } from "../../library/c-library.js";
import { parseInstallFolder, realLibrary } from "../../library/cache-folder.js";
import { type LocatedLibrary, locateLibrary } from "../../library/find-library.js";
import { isNixl, lackedBy, libraryFeatures } from "../../library/library-features.js";
import { reinstallHint } from "../../library/library-package.js";
import { missingParts, nameOfMissing } from "../../library/missing-parts.js";
import type { Host } from "../host.js";
import type { BackendAnswer, RuntimeAnswer } from "../probes.js";
import type { Check } from "../report.js";

const MIN_NODE_MAJOR = 20;
/** Sources that name a library by its path. */
const EXPLICIT: readonly string[] = ["the option library", "KV_NIXL_LIBRARY", "NIXL_PREFIX"];
/** Text for a backend without peers. */
export const STORAGE_ONLY = "storage only: it reaches no other agent";
const INSTALL = "npx --no-install kv-nixl install";

/**
 * Checks Node, the C library, the addon and the variables that it sets. `outcome` is that of
 * `runtimeProbe`.
 */
export function runtimeChecks(host: Host, outcome: ChildOutcome): Check[] {
  const { platform, arch, nodeVersion, glibc } = host;
  const node = {
    id: "runtime.node",
    area: "runtime",
    title: "Node.js",
    found: `${nodeVersion} on ${platform} ${arch}`,
  } as const;
  const checks: Check[] = [
    Number(nodeVersion.split(".")[0]) >= MIN_NODE_MAJOR
      ? { ...node, status: "ok" }
      : { ...node, status: "fail", fix: `Node.js ${MIN_NODE_MAJOR} or newer` },
    libc(platform, glibc),
  ];
  const addon = { id: "runtime.addon", area: "runtime", title: "addon" } as const;
  if (outcome.kind === "answered") {
    const { addon: path, defaults } = outcome.value as RuntimeAnswer;
    checks.push({ ...addon, status: "ok", found: String(path), details: { path } });
    if (defaults.length > 0) {
      checks.push({
        id: "runtime.defaults",
        area: "runtime",
        title: "set by the addon",
        status: "note",
        found: defaults.map(([name, value]) => `${name}=${value}`).join(" "),
        details: Object.fromEntries(defaults),
      });
    }
  } else
    checks.push({
      ...addon,
      ...failure(outcome, "npm install again on this machine; in the repository: npm run setup"),
    });
  return checks;
}

function libc(platform: string, glibc: string | undefined): Check {
  const check = { id: "runtime.libc", area: "runtime", title: "C library" } as const;
  const problem = cLibraryProblem(platform, glibc);
  return problem === undefined
    ? { ...check, status: "ok", found: `glibc ${glibc}` }
    : { ...check, status: "fail", ...problem };
}

/**
 * Checks which library is used, the setting that selected it, and whether it loads. `located` is
 * undefined when none loads.
 */
export async function libraryCheck(
  host: Host,
  environment: Environment,
  library: string | undefined,
): Promise<{ check: Check; located: LocatedLibrary | undefined }> {
  const check = { id: "library.path", area: "library", title: "NIXL" } as const;
  try {
    const located = await locateLibrary({ environment, library });
    const problem = await loadProblem(located, environment);
    if (problem !== undefined) {
      const found = `${problem.found}, from ${located.source}\n${located.path}`;
      const details = { ...located };
      return {
        check: { ...check, status: "fail", found, fix: problem.fix, details },
        located: undefined,
      };
    }
    const real = realLibrary(located.path);
    const version = versionOf(real, host);
    const features = await libraryFeatures(located.path);
    const lacked = lackedBy(features);
    const without =
      lacked.length > 0
        ? `; it has no ${lacked.join(" and no ")}, which this package does not need`
        : "";
    const link = real === located.path ? "" : `, a link to ${real}`;
    const found = `${version ?? "of unknown version"}, from ${located.source}${without}\n${located.path}${link}`;
    return {
      check: {
        ...check,
        status: "ok",
        found,
        details: { ...located, version: version ?? null, features },
      },
      located,
    };
  } catch (error) {
    const {
      code,
      message,
      hint = INSTALL,
      details,
    } = KvError.from(error, "KV_INTERNAL", "the search failed");
    const attempts = Array.isArray(details.attempts) ? (details.attempts as string[]) : [];
    const found = `${message.split(";")[0]} [${code}]${attemptsText(attempts)}`;
    const fix = hint.replace(/^run: /, "");
    return { check: { ...check, status: "fail", found, fix, details }, located: undefined };
  }
}

/** Why the library does not load on this machine, or is not NIXL's; undefined when it is fine. */
async function loadProblem(
  { path, source }: LocatedLibrary,
  environment: Environment,
): Promise<{ found: string; fix: string } | undefined> {
  const reinstall = EXPLICIT.includes(source)
    ? `set ${source} to a libnixl_capi.so of this machine, or leave it out and run: ${INSTALL}`
    : reinstallHint(path, environment);
  // As the addon loads it: libraries beside the file are searched beside the real file.
  const missing = await missingParts(realLibrary(path), { environment });
  const damaged = missing.find(({ kind }) => kind === "file");
  if (damaged !== undefined) {
    return {
      found: `not a library that loads on this machine: ${nameOfMissing(damaged).trim()}`,
      fix: reinstall,
    };
  }
  if (missing.length > 0) {
    const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
    return { found, fix: remedyFor("NIXL", missing, { hasDependencies: true, reinstall }) };
  }
  if (await isNixl(path)) return undefined;
  return {
    found: "a library, but not NIXL's: it has none of the functions of NIXL's C API",
    fix: reinstall,
  };
}

/** One line for each kind of place that was tried, with the first place of that kind. */
function attemptsText(attempts: readonly string[]): string {
  const kinds = new Map<string, string[]>();
  for (const attempt of attempts) {
    const [, place = attempt, source = "also"] = /^(.*?) \((.*?)\): /.exec(attempt) ?? [];
    kinds.set(source, [...(kinds.get(source) ?? []), place]);
  }
  return Array.from(kinds, ([source, [first, ...more]]) => {
    const rest = more.length > 0 ? ` and ${more.length} other places` : "";
    return `\n${source}: ${first}${rest}`;
  }).join("");
}

/**
 * The version, from the folder name of `kv-nixl install` or from pip's record beside the library.
 * The library itself does not state it.
 */
function versionOf(path: string, host: Host): string | undefined {
  const folder = dirname(dirname(path));
  const installed = parseInstallFolder(basename(folder));
  if (installed !== undefined) return `${installed.version} (cu${installed.cuda})`;
  const record = host.names(folder).find((name) => /^nixl_cu\d+-[0-9].*\.dist-info$/.test(name));
  const [, cuda, version] = /^nixl_(cu\d+)-(.*)\.dist-info$/.exec(record ?? "") ?? [];
  return version === undefined ? undefined : `${version} (${cuda})`;
}

/** Checks that an agent with the backend starts. `outcome` is that of `backendProbe`. */
export function backendCheck(name: string, outcome: ChildOutcome): Check {
  const check = {
    id: `library.backend.${name}`,
    area: "library",
    title: `backend ${name}`,
  } as const;
  if (outcome.kind !== "answered") return { ...check, ...failure(outcome, INSTALL) };
  const answer = outcome.value as BackendAnswer;
  const alone = answer.metadataBytes === null ? `; ${STORAGE_ONLY}` : "";
  return {
    ...check,
    status: "ok",
    found: `ready in ${Math.round(answer.startMs)} ms; memory that can be registered: ${answer.memoryTypes.join(", ")}${alone}`,
    details: { ...answer },
  };
}

function failure(outcome: ChildFailure, fix: string): Pick<Check, "status" | "found" | "fix"> {
  const hint = outcome.kind === "failed" ? outcome.error.hint : undefined;
  return { status: "fail", found: failureText(outcome), fix: hint ?? fix };
}
