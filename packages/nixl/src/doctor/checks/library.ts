import { basename, dirname } from "node:path";
import { KvError } from "@kv/interface";
import { remedyFor } from "../../backends/plugins.js";
import type { ChildOutcome } from "../../child/run-in-child.js";
import {
  type Environment,
  type LocatedLibrary,
  locateLibrary,
  realLibrary,
} from "../../library/find-library.js";
import { isNixl, lackedBy, libraryFeatures } from "../../library/library-features.js";
import { missingParts, nameOfMissing } from "../../library/missing-parts.js";
import { howToReinstall } from "../../library/reinstall-hint.js";
import type { Host } from "../host.js";
import type { BackendAnswer, RuntimeAnswer } from "../probes.js";
import type { Check } from "../report.js";
import { withWords } from "../stderr-tail.js";

const MIN_NODE_MAJOR = 20;
const MIN_GLIBC = [2, 28] as const;
/** Sources of a library that somebody named by its place. */
const NAMED: readonly string[] = ["the option library", "KV_NIXL_LIBRARY", "NIXL_PREFIX"];
/** Of a backend without peers. */
export const STORAGE_ONLY = "storage alone: it reaches no other agent";
const INSTALL = "npx --no-install kv-nixl install";

/** Node, the C library, the addon and what it sets in the environment. */
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
  if (glibc === undefined) {
    const found =
      platform === "linux" ? "not glibc (musl?)" : `none that NIXL is built for: it runs on Linux`;
    return {
      ...check,
      status: "fail",
      found,
      fix: "a Linux with glibc; or @kv/transport-memory, which runs anywhere",
    };
  }
  const [major = 0, minor = 0] = glibc.split(".").map(Number);
  const enough = major > MIN_GLIBC[0] || (major === MIN_GLIBC[0] && minor >= MIN_GLIBC[1]);
  if (enough) return { ...check, status: "ok", found: `glibc ${glibc}` };
  return {
    ...check,
    status: "fail",
    found: `glibc ${glibc}`,
    fix: `NIXL's wheels need ${MIN_GLIBC.join(".")} or newer`,
  };
}

/** Where the library is, and by whose word. Undefined when there is none. */
export async function libraryCheck(
  host: Host,
  environment: Environment,
  library: string | undefined,
): Promise<{ check: Check; located: LocatedLibrary | undefined }> {
  const check = { id: "library.path", area: "library", title: "NIXL" } as const;
  try {
    const located = await locateLibrary({ environment, ...(library === undefined ? {} : { library }) });
    const problem = await problemOf(located, environment);
    if (problem !== undefined) {
      const found = `${problem.found}, from ${located.source}\n${located.path}`;
      const details = { ...located };
      return { check: { ...check, status: "fail", found, fix: problem.fix, details }, located: undefined };
    }
    const real = realLibrary(located.path);
    const version = versionOf(real, host);
    const features = await libraryFeatures(located.path);
    const lacked = lackedBy(features);
    const without =
      lacked.length > 0 ? `; it has no ${lacked.join(" and no ")}, which nothing here needs` : "";
    const found = `${version ?? "of unknown version"}, from ${located.source}${without}\n${located.path}${real === located.path ? "" : `, a link to ${real}`}`;
    return {
      check: { ...check, status: "ok", found, details: { ...located, version: version ?? null, features } },
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

/** Why the library cannot be loaded here, or is not NIXL's; undefined for neither. */
async function problemOf(
  { path, source }: LocatedLibrary,
  environment: Environment,
): Promise<{ found: string; fix: string } | undefined> {
  const again = NAMED.includes(source)
    ? `name a libnixl_capi.so of this machine by ${source}, or leave it out for NIXL of ${INSTALL}`
    : howToReinstall(path, environment);
  // As the addon loads it: what lies beside the file is looked for where the links lead.
  const missing = await missingParts(realLibrary(path), { environment });
  const damaged = missing.find(({ kind }) => kind === "file");
  if (damaged !== undefined) {
    return { found: `not a library that loads here: ${nameOfMissing(damaged).trim()}`, fix: again };
  }
  if (missing.length > 0) {
    const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
    return { found, fix: remedyFor("NIXL", missing, { installed: true, again }) };
  }
  if (await isNixl(path)) return undefined;
  return { found: "a library, and not NIXL's: it has none of the functions of NIXL's C API", fix: again };
}

/** A line for each kind of place, with the first of its places. */
function attemptsText(attempts: readonly string[]): string {
  const kinds = new Map<string, string[]>();
  for (const attempt of attempts) {
    const [, place = attempt, source = "besides"] = /^(.*?) \((.*?)\): /.exec(attempt) ?? [];
    kinds.set(source, [...(kinds.get(source) ?? []), place]);
  }
  return Array.from(kinds, ([source, [first, ...more]]) => {
    const rest = more.length > 0 ? ` and ${more.length} other places` : "";
    return `\n${source}: ${first}${rest}`;
  }).join("");
}

/** From the folder that `kv-nixl install` made, or from pip's record beside the library: the library itself does not tell. */
function versionOf(path: string, host: Host): string | undefined {
  const folder = dirname(dirname(path));
  const installed = /^nixl-(cu\d+)-([0-9][0-9.a-z]*)-/.exec(basename(folder));
  if (installed !== null) return `${installed[2]} (${installed[1]})`;
  const record = host.names(folder).find((name) => /^nixl_cu\d+-[0-9].*\.dist-info$/.test(name));
  const [, cuda, version] = /^nixl_(cu\d+)-(.*)\.dist-info$/.exec(record ?? "") ?? [];
  return version === undefined ? undefined : `${version} (${cuda})`;
}

/** An agent with the backend, made in another process. */
export function backendCheck(name: string, outcome: ChildOutcome): Check {
  const check = { id: `library.backend.${name}`, area: "library", title: `backend ${name}` } as const;
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

function failure(
  outcome: Exclude<ChildOutcome, { kind: "answered" }>,
  fix: string,
): Pick<Check, "status" | "found" | "fix"> {
  if (outcome.kind === "failed") {
    const { code, message, hint } = outcome.error;
    return { status: "fail", found: withWords(`${message} [${code}]`, outcome), fix: hint ?? fix };
  }
  const end =
    outcome.kind === "late" ? `did not answer in ${outcome.timeoutMs / 1000} s` : `ended with ${outcome.how}`;
  return { status: "fail", found: withWords(`the process that tried it ${end}`, outcome), fix };
}
