import { readFile } from "node:fs/promises";
import { basename, dirname } from "node:path";
import { KvError } from "@kv/interface";
import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import { REPAIRS } from "../../addon/repairs.js";
import { remedyFor } from "../../backends/plugins.js";
import type { Environment } from "../../environment.js";
import type { Host } from "../../host.js";
import { cLibraryProblem } from "../../library/c-library.js";
import { parseInstallFolder, realLibrary } from "../../library/cache-folder.js";
import { type LocatedLibrary, locateLibrary } from "../../library/find-library.js";
import { reinstallHint } from "../../library/library-package.js";
import { missingParts, nameOfMissing } from "../../library/missing-parts.js";
import type { Check } from "../../reports.js";
import type { BackendAnswer, RuntimeAnswer } from "../probes.js";
import { finding } from "./finding.js";

const MIN_NODE_MAJOR = 20;
const EXPLICIT: readonly string[] = ["the option library", "KV_NIXL_LIBRARY", "NIXL_PREFIX"];
export const STORAGE_ONLY = "storage only: it reaches no other agent";
const INSTALL = "npx --no-install kv-nixl install";

/** `outcome` is that of `runtimeProbe`. */
export function runtimeChecks(host: Host, outcome: ChildOutcome): Check[] {
  const { platform, arch, nodeVersion, glibc } = host;
  const isNew = Number(nodeVersion.split(".")[0]) >= MIN_NODE_MAJOR;
  const checks: Check[] = [
    finding("runtime", "node", "Node.js")(
      isNew ? "ok" : "fail",
      `${nodeVersion} on ${platform} ${arch}`,
      isNew ? undefined : `Node.js ${MIN_NODE_MAJOR} or newer`,
    ),
    libc(platform, glibc),
  ];
  const addon = finding("runtime", "addon", "addon");
  if (outcome.kind !== "answered") {
    const fix = "npm install again on this machine; in the repository: npm run setup";
    return [...checks, addon("fail", failureText(outcome), fixOf(outcome, fix))];
  }
  const { addon: path, defaults } = outcome.value as RuntimeAnswer;
  checks.push(addon("ok", String(path)));
  if (defaults.length > 0) {
    const found = defaults.map(([name, value]) => `${name}=${value}`).join(" ");
    const details = Object.fromEntries(defaults);
    checks.push(finding("runtime", "defaults", "set by the addon", details)("note", found));
  }
  return checks;
}

function libc(platform: string, glibc: string | undefined): Check {
  const check = finding("runtime", "libc", "C library");
  const problem = cLibraryProblem(platform, glibc);
  return problem === undefined
    ? check("ok", `glibc ${glibc}`)
    : check("fail", problem.found, problem.fix);
}

/** `located` is undefined when no library loads. */
export async function libraryCheck(
  host: Host,
  environment: Environment,
  library: string | undefined,
): Promise<{ check: Check; located: LocatedLibrary | undefined }> {
  const check = (details: Check["details"]) => finding("library", "path", "NIXL", details);
  try {
    const located = await locateLibrary({ environment, library });
    const problem = await loadProblem(located, environment);
    if (problem !== undefined) {
      const found = `${problem.found}, from ${located.source}\n${located.path}`;
      return { check: check({ ...located })("fail", found, problem.fix), located: undefined };
    }
    const real = realLibrary(located.path);
    const version = versionOf(real, host);
    const link = real === located.path ? "" : `, a link to ${real}`;
    const found = `${version ?? "of unknown version"}, from ${located.source}\n${located.path}${link}`;
    const details = { ...located, version: version ?? null };
    return { check: check(details)("ok", found), located };
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
    return { check: check(details)("fail", found, fix), located: undefined };
  }
}

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
  // The names in a library's string table end with a NUL.
  const isNixl = (await readFile(path)).includes("\0nixl_capi_create_configured_agent\0");
  if (isNixl) return undefined;
  return {
    found: "a library, but not NIXL's: it has none of the functions of NIXL's C API",
    fix: reinstall,
  };
}

/** One line for each kind of place, with its first place. */
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
 * The library does not state its version; the folder name of `kv-nixl install` or pip's record
 * does.
 */
function versionOf(path: string, host: Host): string | undefined {
  const folder = dirname(dirname(path));
  const installed = parseInstallFolder(basename(folder));
  if (installed !== undefined) return `${installed.version} (cu${installed.cuda})`;
  const record = host.names(folder).find((name) => /^nixl_cu\d+-[0-9].*\.dist-info$/.test(name));
  const [, cuda, version] = /^nixl_(cu\d+)-(.*)\.dist-info$/.exec(record ?? "") ?? [];
  return version === undefined ? undefined : `${version} (${cuda})`;
}

/** `outcome` is that of `backendProbe`. */
export function backendCheck(name: string, outcome: ChildOutcome): Check {
  const check = (details?: Check["details"]) =>
    finding("library", `backend.${name}`, `backend ${name}`, details);
  if (outcome.kind !== "answered")
    return check()("fail", failureText(outcome), fixOf(outcome, INSTALL));
  const answer = outcome.value as BackendAnswer;
  const alone = answer.metadataBytes === null ? `; ${STORAGE_ONLY}` : "";
  const found = `ready in ${Math.round(answer.startMs)} ms; memory that can be registered: ${answer.memoryTypes.join(", ")}${alone}`;
  return check({ ...answer })("ok", found);
}

export function repairChecks(backend: string, outcome: ChildOutcome): Check[] {
  if (outcome.kind !== "answered") return [];
  const { repairs } = outcome.value as BackendAnswer;
  return repairs.flatMap(([name, state, why]): Check[] => {
    const repair = REPAIRS[name];
    if (state === "waiting" || repair === undefined) return [];
    const { of, fault, without } = repair;
    const details = { state, ...repair };
    const check = finding("library", `repair.${backend}.${name}`, `repair ${name}`, details);
    if (state === "holds") return [check("ok", `holds; ${of}: ${fault}`)];
    if (state === "off") return [check("note", `switched off by KV_NIXL_REPAIRS_OFF: ${without}`)];
    return [check("warn", `did not take hold: ${why}; ${without}`, INSTALL)];
  });
}

const fixOf = (outcome: ChildFailure, fix: string): string =>
  (outcome.kind === "failed" ? outcome.error.hint : undefined) ?? fix;
