import { KV_CACHE_KINDS, type KvCacheKind, KvError } from "@kv/interface";
import { groupsOfConfig } from "@kv/kv-plan";
import { listOf, oneOf } from "@kv/program";
import { type Command, Option } from "commander";
import type { GivenGroups } from "../protocol/cache-groups.js";

/** What `addGroupsOptions` adds to a command's options. */
export interface GroupsOptions {
  readonly groups?: readonly KvCacheKind[];
  readonly config?: string;
}

/** `--config` and `--groups`: the KV cache groups of an engine, which handshakes do not carry. */
export function addGroupsOptions(command: Command): Command {
  return command
    .option(
      "--config <file>",
      "config.json of the model: the kinds of its KV cache groups follow from it",
    )
    .addOption(
      new Option(
        "--groups <kinds>",
        "kind of each KV cache group, such as full,mamba, where handshakes do not say it and there is no config.json",
      ).argParser(listOf(oneOf(...KV_CACHE_KINDS))),
    );
}

/**
 * The groups that the flags give; undefined where none does. Errors: `KV_CONFIG_INVALID` for both
 * flags; those of `groupsOfConfig`.
 */
export async function givenGroups({
  groups,
  config,
}: GroupsOptions): Promise<GivenGroups | undefined> {
  if (config === undefined) return groups;
  if (groups === undefined) return await groupsOfConfig(config);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--config ${config} and --groups ${groups.join(",")} are both given`,
    { hint: "leave out --groups" },
  );
}
