"""What vLLM, FastDeploy, PaddleNLP and SGLang call options, for commands, files and programs that were written for them."""
