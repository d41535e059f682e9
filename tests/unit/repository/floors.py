"""In what order the modules of each folder build on each other (docs/architecture.md)."""

from __future__ import annotations

FLOORS = {
    "specdec": """
        addresses backoff certificates chat_template_files grpc_polling message_sizes parent_process session_keys
        sampling_limits sampling_params settings_sources shipped_pair tls_files v1
        constraint_limits
        endpoints engine grammar store telemetry
        drafters
        heads
        layer_skip
        rpc
        client config
        worker
        drafting
        auditing benchmark debugging
        tuning
        training
        checkup
        cli
    """,
    "specdec.drafting.lookup": """
        corpus options
        interface
        growing
        lookahead ngram openai_api prediction suffix
        registry
    """,
    "specdec.drafting.endpoints": """
        options
        calls
    """,
    "specdec.drafting.heads": """
        checkpoint parts session
        cache config vocabulary
        footprint passes
        drawing replays
        target
        cached
        growth
        serial slots
        methods
    """,
    "specdec.drafting.heads.methods": """
        dflash eagle3 medusa
        dspark eagle peagle
        registry
    """,
    "specdec.drafting.layer_skip": """
        matchness search
        drafter
    """,
    "specdec.drafting.role": """
        commits growth metrics session translation
        forced guess host opening proposals
        branches work
        ahead block text
        drafter
        local
    """,
    "specdec.constraints.limits": """
        formats
        structural_tags
        faults
    """,
    "specdec.drafting.text": """
        bridge
        session
        following proposals
        drafter
    """,
    "specdec.drafting.translation": """
        tokens
        shared
        files runner
        build
    """,
    "specdec.constraints.grammar": """
        failure json_schemas
        structural_tags
        source
        checker checker_child figures follower
        compiler
        awaited
    """,
    "specdec.engine": """
        errors sublayers
        settings
        block_pool tap tree
        sequence
        outputs scheduler
        ahead batch
        attention parallel runner
        cuda flight native
        checkpoints engine
        model sampling
        drawing leading_runner
    """,
    "specdec.replica.worker": """
        clamping engine_gauges errors rank_child trace
        opening ranks sessions
        isolation role
        pending_responses
        host
        loop
        entry
        build
    """,
    "specdec.service": """
        affinity error_details listening metrics_server startup tls_watch
        errors settings
        abort reading
        error_interceptor readiness tls
        channel metrics_endpoint
        server
        bridge
    """,
    "specdec.commands.measuring": """
        figures progress svg tables
        report requests streams
        closed_loop prompts served
        summary
        breakdown
    """,
    "specdec.commands.audit": """
        greedy reference sampled services
        audit
    """,
    "specdec.commands.doctor": """
        findings
        behaviour head_layers replicas surroundings
        settings_file
    """,
    "specdec.commands.debug": """
        steps
        page
    """,
    "specdec.commands.tune": """
        measured probe
        prediction
        advice
        pages settings_files
    """,
    "specdec.commands.train": """
        layer_ids losses
        recipe
        checkpoint texts
        continued states
        trainee
        kinds loop
        acceptance
        job
        trial
        worth
    """,
    "specdec.commands": """
        connection inputs keys sampling_options views
        errors
        generate health local models
        serve tuning up
        bench demo inspection train tune
        app
        main
    """,
    "coordinator": """
        tasks text
        sessions tenants
        journal links
        observer replicas
        finishing intake
        decode_loop replay
        generation recovery
        connections servicer
        service
        processes
        __main__
    """,
    "gateway": """
        api chat page upstream
        settings
        http translation
        parts
        routes
        app
        service
        __main__
    """,
    "specdec.gateway.chat": """
        deltas markers messages
        tool_calls
        reasoning
        parsing
    """,
    "target_service": """
        logprobs policy servicer tree
        prompt_logprobs
        __main__ session
        admission masks pacing
        decide
        api candidates records
        proposals
        turns verdicts
        commits
        verifier
        processes
        worker
    """,
    "specdec.config": """
        replica
        coordinator draft
        target
    """,
    "specdec.target_service.admission": """
        forks opening
        admission
    """,
    "specdec.target_service.pacing": """
        expectations
        pacing
    """,
    "specdec.target_service.processes": """
        wire
        model
    """,
    "specdec.target_service.api": """
        answers session
        calls
        role
        process
    """,
    "draft_service": """
        servicer target_facts wire
        model_process plain
        worker
        __main__
    """,
    "specdec.draft_service.plain": """
        proposals session recorder
        opening
        role
        process
    """,
    "specdec.drafting.endpoints": """
        alignment ledger
        stream
        drafter
    """,
}
"""Floors from the lowest up: a line imports from lines before it only. Names on one line do not know each other."""
