"""In what order the modules of each folder build on each other (docs/architecture.md)."""

from __future__ import annotations

FLOORS = {
    "specdec": """
        v1 wire
        store telemetry
        engine service
        client config constraints
        replica
        drafting
        commands
        coordinator draft_service gateway target_service
        plan
    """,
    "specdec.commands": """
        field_flags request_options shipped_pair views
        connection errors health keys measuring
        drafters fetch generate inputs models
        debug up
        audit bench demo serve tune
        app train
        doctor main
    """,
    "specdec.commands.audit": """
        greedy reference sampled services
        audit
        command
    """,
    "specdec.commands.debug": """
        steps
        debug_view page
        command
    """,
    "specdec.commands.doctor": """
        findings
        behaviour head_layers replicas surroundings
        settings_file
        command
    """,
    "specdec.commands.measuring": """
        progress requests streams svg tables
        closed_loop prompts report served
        summary
        breakdown
    """,
    "specdec.commands.train": """
        candidates layer_ids losses pace
        recipe
        checkpoint recorded
        trainee
        acceptance kinds loop
        job
        trial
        worth
        command
    """,
    "specdec.commands.train.recorded": """
        journal texts
        continued mapped
        states
        teachers
    """,
    "specdec.commands.tune": """
        measured probe
        prediction
        advice probe_processes
        pages settings_files
        verification
        placements
        command
    """,
    "specdec.commands.up": """
        cores devices drafters service_process
        cluster mps
        plan supervision
        placement
        command
    """,
    "specdec.config": """
        endpoint_options generation_config nodes retired
        replica
        coordinator drafter_options sources
        draft
        target
    """,
    "specdec.constraints": """
        limits
        grammar
    """,
    "specdec.constraints.grammar": """
        figures held line_process structural_tags
        source
        checker follower
        apart apart_child compiler
        awaited checker_child
    """,
    "specdec.constraints.limits": """
        formats
        structural_tags
        faults
    """,
    "specdec.coordinator": """
        tasks text
        sessions tenants
        journal links
        observer replicas
        draft_relay finishing intake timings
        decode_loop recovery
        connections opening
        generation
        open_inference servicer vllm_engine
        service
        child_main
        child_process
        supervisor
        __main__
    """,
    "specdec.coordinator.intake": """
        conversation line load_shedding reads resume validation
        fair_queue
        shares
        admission prompt_length
        text_limits
        prompt
        conversions terms
        planning
        callers
    """,
    "specdec.coordinator.intake.reads": """
        later_reads pending_reads reading
    """,
    "specdec.coordinator.open_inference": """
        tensors
        requests
        responses
        servicer
    """,
    "specdec.coordinator.vllm_engine": """
        requests responses tokenizer_archive
        servicer
    """,
    "specdec.draft_service": """
        __main__ target_facts
        model_process modelless
        worker
    """,
    "specdec.draft_service.modelless": """
        metrics proposals session
        role
        process
    """,
    "specdec.drafting": """
        corpus role translation
        interface text
        endpoints heads lookup
        layer_skip registry
    """,
    "specdec.drafting.endpoints": """
        alignment calls ledger
        stream
        drafter
    """,
    "specdec.drafting.heads": """
        checkpoint drawing parts session
        cache config growth vocabulary
        footprint passes slots
        replays
        target
        cached
        serial
        methods
    """,
    "specdec.drafting.heads.methods": """
        dflash eagle3 medusa mtp
        dspark eagle peagle
        registry
    """,
    "specdec.drafting.layer_skip": """
        matchness search
        drafter
    """,
    "specdec.drafting.lookup": """
        lookahead ngram prediction suffix
    """,
    "specdec.drafting.role": """
        commits growth metrics
        session
        corrections
        branches guess opening
        ahead block work
        drafter
        local
    """,
    "specdec.drafting.text": """
        bridge
        session
        drafter
    """,
    "specdec.drafting.translation": """
        tokens
        shared
        runner
        build
    """,
    "specdec.engine": """
        errors sublayers tap
        block_pool settings tree
        sequence
        states
        ahead outputs scheduler
        batch
        attention parallel runner
        cuda flight native
        checkpoints engine recurrent sampling
        model
        drawing leading_runner
    """,
    "specdec.engine.recurrent": """
        convolution
        scans
        layers native
    """,
    "specdec.engine.states": """
        memory sessions
        plan
    """,
    "specdec.gateway": """
        api chat page upstream
        schemas
        http parser_names settings translation
        anthropic openness
        parts responses
        routes
        app
        service
        __main__
    """,
    "specdec.gateway.anthropic": """
        answer request
        to_chat
    """,
    "specdec.gateway.responses": """
        request tools
        items
        output to_chat whole
        answer
    """,
    "specdec.gateway.chat": """
        deltas template_parsers tool_choice
        messages tool_calls
        reasoning thoughts
        parsing
    """,
    "specdec.plan": """
        inputs
        simulation
        deployment
        kind
        trial
        estimate found proof
        assumptions
        search
        autoscaled
        results
        command
    """,
    "specdec.plan.inputs": """
        devices
        models traffic
        step_times trace_lines
        trace_file
    """,
    "specdec.plan.results": """
        sweep values_file
        page
    """,
    "specdec.plan.simulation": """
        clock core draft tally
        pair
        curve
        draft_pool
        target
        autoscaler coordinator
        faults flow
        fleet
    """,
    "specdec.replica": """
        bridge
        ranks
        worker
    """,
    "specdec.replica.bridge": """
        frame_codec pulse step_memory
        engine_watch frame_writer
        local_sockets
        frames
        engine_answers engine_child
        engine_launch
        engine_process
        engine_keeper stream_relay
        link_dialer
        replica_service
    """,
    "specdec.replica.ranks": """
        connections messages
        rank_child
        gate processes watch
        leading node_service
    """,
    "specdec.replica.worker": """
        engine_gauges errors trace
        opening sessions
        isolation role
        pending_responses
        host
        links
        owner_streams
        loop
        entry
        build
    """,
    "specdec.service": """
        byte_budget error_interceptor exposure listening memory_limit metrics_server open_files process standstill texts
        tls_watch
        metrics_endpoint settings
        readiness
        server
    """,
    "specdec.store": """
        interface scripts
        announcer checks guarded keys tls
        records
        memory
        redis_store
        urls
        settings
    """,
    "specdec.target_service": """
        __main__ logprobs policy tree
        api
        session
        constraint_costs masks pacing
        admission sample_and_walk
        candidates records
        proposals
        turn_times verdicts
        committing
        stepping
        verifier
        model_process
        worker
    """,
    "specdec.target_service.admission": """

    """,
    "specdec.target_service.api": """
        answers session
        calls
        role
        process
    """,
    "specdec.target_service.pacing": """
        expectations
        pacing
    """,
    "specdec.wire": """
        backoff error_details message_sizes rendezvous sampling_limits sampling_params tls_files tokenizer_files
        errors proposals settings
        abort discovery parsing
        tls
        channel
    """,
    "specdec.wire.parsing": """
        parts
        reading
    """,
}
"""Floors from the lowest up: a line imports from lines before it only. Names on one line do not know each other."""
