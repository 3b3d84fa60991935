import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { twoProcessTests } from "./two-processes.js";

twoProcessTests("UCX", nixlMissing);
