import { libfabricMissing } from "./libfabric-here.js";
import { twoProcessTests } from "./two-processes.js";

twoProcessTests("LIBFABRIC", libfabricMissing);
