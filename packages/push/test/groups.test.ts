import { itMovesEveryGroup } from "@kv/testing/groups/group-tests";
import { pushConnector } from "../src/index.js";

itMovesEveryGroup(pushConnector, true);
