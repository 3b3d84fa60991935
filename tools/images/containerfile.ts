import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../release/packages.js";

/** The images, and the package that each holds. */
export const IMAGES = [
  { name: "kv-proxy", package: "@kv/proxy" },
  { name: "kv-epp", package: "@kv/epp" },
  { name: "kv-peer", package: "@kv/peer" },
  { name: "kv-pool", package: "@kv/pool" },
] as const;
export type ImageName = (typeof IMAGES)[number]["name"];

/** What `deploy/containers/NAME/Containerfile` says. */
export interface Containerfile {
  readonly from: readonly string[];
  /** The shell command that installs the packages, in the folder with their tarballs. */
  readonly install: string;
  /** The instructions of the last stage, in their order. */
  readonly last: readonly { readonly instruction: string; readonly rest: string }[];
}

export function readContainerfile(name: ImageName): Containerfile {
  const file = join(root, `deploy/containers/${name}/Containerfile`);
  const instructions = readFileSync(file, "utf8")
    .replaceAll(/\\\n/g, " ")
    .split("\n")
    .filter((line) => line !== "" && !line.startsWith("#"))
    .map((line) => {
      const [, instruction = "", rest = ""] = /^(\S+) +(.*)$/.exec(line) ?? [];
      return { instruction, rest };
    });
  const begin = instructions.findLastIndex(({ instruction }) => instruction === "FROM") + 1;
  const restOf = (wanted: string, among = instructions) =>
    among.filter(({ instruction }) => instruction === wanted).map(({ rest }) => rest);
  const [install = ""] = restOf("RUN", instructions.slice(0, begin));
  return { from: restOf("FROM"), install, last: instructions.slice(begin) };
}

/** The configuration of an OCI image: how a container of it is started. */
export function configOf({ last }: Containerfile) {
  const restOf = (wanted: string) =>
    last.filter(({ instruction }) => instruction === wanted).map(({ rest }) => rest);
  const one = (wanted: string): string => {
    const [rest, ...more] = restOf(wanted);
    if (rest === undefined || more.length > 0) throw new Error(`one ${wanted} is expected`);
    return rest;
  };

  return {
    User: one("USER"),
    WorkingDir: one("WORKDIR"),
    Env: ["PATH=/usr/local/bin:/usr/bin:/bin", ...restOf("ENV")],
    ExposedPorts: Object.fromEntries(
      restOf("EXPOSE").flatMap((ports) => ports.split(" ").map((port) => [`${port}/tcp`, {}])),
    ),
    Entrypoint: JSON.parse(one("ENTRYPOINT")) as string[],
    Cmd: JSON.parse(restOf("CMD")[0] ?? "[]") as string[],
  };
}
